// The scheduler of the emulator: fibers of one block in turn until all have left.
#include "emulator.h"

#include <sys/mman.h>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

dim3 grid, block_size, block_index;
Fiber* fibers;
Fiber* current;
std::vector<Exchange> exchanges;
unsigned char* dynamic_shared;
size_t dynamic_bytes;
const char* problem;

namespace {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t SHARED_BYTES = 227 << 10;  // what a block of the largest chips can have
constexpr unsigned MOST_THREADS = 1024;

Fiber storage[MOST_THREADS];
unsigned char* stacks;
void (*kernel_body)(void*);
void* kernel_context;

std::vector<Region> awaited_regions;
std::vector<std::vector<unsigned char>> awaited_contents;
bool waits;  // whether a thread of the block has yet to await the inputs

void hide_inputs() {
    waits = !awaited_regions.empty();
    for (size_t i = 0; i < awaited_regions.size(); i++) {
        const Region& region = awaited_regions[i];
        awaited_contents[i].assign(region.at, region.at + region.bytes);
    }
    for (const Region& region : awaited_regions) std::memset(region.at, 0xff, region.bytes);
}

void show_inputs() {
    for (size_t i = 0; i < awaited_regions.size(); i++)
        std::memcpy(awaited_regions[i].at, awaited_contents[i].data(), awaited_regions[i].bytes);
    waits = false;
}

#ifdef __x86_64__
void* scheduler;

extern "C" void isobit_switch(void** save, void* to);
// Saves the registers that a call preserves and takes up the other stack.
asm(R"(
.text
.local isobit_switch
.type isobit_switch, @function
isobit_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

void enter() {
    kernel_body(kernel_context);
    current->state = DONE;
    isobit_switch(&current->stack_pointer, scheduler);
    std::abort();
}

void prepare(Fiber& fiber, unsigned char* stack) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(enter);
    top -= 6;
    fiber.stack_pointer = top;
}

void resume(Fiber& fiber) {
    current = &fiber;
    isobit_switch(&scheduler, fiber.stack_pointer);
}

void leave() { isobit_switch(&current->stack_pointer, scheduler); }
#else
ucontext_t contexts[MOST_THREADS], scheduler;

void enter() {
    kernel_body(kernel_context);
    current->state = DONE;
}

void prepare(Fiber& fiber, unsigned char* stack) {
    ucontext_t& context = contexts[&fiber - storage];
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = &scheduler;
    makecontext(&context, enter, 0);
}

void resume(Fiber& fiber) {
    current = &fiber;
    swapcontext(&scheduler, &contexts[&fiber - storage]);
}

void leave() { swapcontext(&contexts[current - storage], &scheduler); }
#endif

// Let a warp's lanes, or the block's threads, go on when all of them wait at the same barrier.
bool release(unsigned first, unsigned last, State barrier, bool all_must_wait) {
    unsigned waiting = 0, done = 0;
    for (unsigned i = first; i < last; i++) {
        waiting += fibers[i].state == barrier;
        done += fibers[i].state == DONE;
    }
    if (!waiting || waiting + done < last - first) return false;
    if (done && all_must_wait) {
        problem = "a lane left the kernel before a warp collective";
        return false;
    }
    for (unsigned i = first; i < last; i++)
        if (fibers[i].state == barrier) fibers[i].state = READY;
    return true;
}

// Whether a warp falls behind the others for a while, as on a GPU: the same warps in every run.
bool is_late() {
    static unsigned state;
    state = state * 1664525u + 1013904223u;
    return state >> 28 == 0;
}

void run_block(unsigned threads) {
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.state = READY;
        fiber.collectives = 0;
        fiber.thread = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        prepare(fiber, stacks + i * STACK_BYTES);
    }
    for (;;) {
        bool moved = false, left = false;
        for (unsigned warp = 0; warp < threads; warp += 32) {
            const unsigned end = warp + 32 < threads ? warp + 32 : threads;
            if (is_late()) {
                moved = true;
                continue;
            }
            do {
                for (unsigned i = warp; i < end; i++)
                    if (fibers[i].state == READY) {
                        resume(fibers[i]);
                        moved = true;
                    }
                if (problem) return;
            } while (release(warp, end, AT_WARP, true));
            if (problem) return;
        }
        moved |= release(0, threads, AT_BLOCK, false);
        for (unsigned i = 0; i < threads; i++) left |= fibers[i].state != DONE;
        if (!left) return;
        if (!moved) {
            problem = "some threads wait at a barrier that the others never reach";
            return;
        }
    }
}

}  // namespace

void pause(State state) {
    current->state = state;
    leave();
}

void set_awaited(const Region* regions, size_t count) {
    awaited_regions.assign(regions, regions + count);
    awaited_contents.resize(count);
}

void await_inputs() {
    if (waits) show_inputs();
}

void run(const dim3& grid_size, const dim3& size, size_t shared_bytes, void (*body)(void*), void* context) {
    problem = nullptr;
    dynamic_bytes = shared_bytes;
    grid = grid_size;
    block_size = size;
    kernel_body = body;
    kernel_context = context;
    fibers = storage;
    const unsigned threads = size.x * size.y * size.z;
    if (!threads || threads > MOST_THREADS || shared_bytes > SHARED_BYTES) {
        problem = "the launch is larger than a block can be";
        return;
    }
    if (!stacks) {
        const size_t bytes = MOST_THREADS * STACK_BYTES + SHARED_BYTES;
        stacks = static_cast<unsigned char*>(
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        dynamic_shared = stacks + MOST_THREADS * STACK_BYTES;
    }
    exchanges.resize((threads + 31) / 32);
    for (block_index.z = 0; block_index.z < grid.z; block_index.z++)
        for (block_index.y = 0; block_index.y < grid.y; block_index.y++)
            for (block_index.x = 0; block_index.x < grid.x; block_index.x++) {
                std::memset(dynamic_shared, 0xff, shared_bytes);
                hide_inputs();
                run_block(threads);
                if (waits) {
                    show_inputs();
                    if (!problem) problem = "a block of an early kernel ended before it awaited its inputs";
                }
                if (problem) return;
            }
}

}  // namespace emulator
