"""What is checked and measured on a GPU in one go: `python bench/cuda/device.py STEP...`, each step by itself.

A step that fails is reported and the others go on; exit code 1 if any failed.
"""

import subprocess
import sys
import time

STEPS: dict[str, list[str]] = {
    "dialect": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/test_on_gpu.py"],
    "contract": ["-m", "isobit.cli", "contract", "--device", "cuda"],
}


def main() -> int:
    failed = []
    for step in sys.argv[1:] or STEPS:
        start = time.monotonic()
        code = subprocess.run([sys.executable, *STEPS[step]], check=False).returncode
        print(f"--- {step}: exit code {code}, {time.monotonic() - start:.1f} s", flush=True)
        if code:
            failed.append(step)
    print(f"failed: {', '.join(failed)}" if failed else "all steps passed")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
