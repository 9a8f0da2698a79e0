"""A run of the matrix: every pair of values, then random cells for as long as there is time."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isobit.exact.cells import Cell, covering_cells, random_cell
from isobit.exact.watch import Record
from isobit.exact.workload import Laboratory, Subject


@dataclass(frozen=True)
class Outcome:
    """One cell's result. difference: None, or what differs from the oracle, and where, in one line."""

    cell: Cell
    prompt_tokens: int
    difference: str | None


def run_matrix(laboratory: Laboratory, rng: np.random.Generator, minutes: float) -> Iterator[Outcome]:
    """Every pair of values at least once, however long it takes; then random cells until `minutes` have passed."""
    started = time.monotonic()
    subjects = {name: laboratory.subject(name == "sampled") for name in ("greedy", "sampled")}
    for cell in filter(laboratory.can_run, covering_cells(rng)):
        yield compute(laboratory, subjects[cell.sampling], cell)
    while time.monotonic() - started < 60 * minutes:
        cell = random_cell(rng)
        if not laboratory.can_run(cell):
            continue
        subjects[cell.sampling] = laboratory.subject(cell.sampling == "sampled")
        yield compute(laboratory, subjects[cell.sampling], cell)


def compute(laboratory: Laboratory, subject: Subject, cell: Cell) -> Outcome:
    """The cell's record against the oracle's."""
    record = laboratory.run(subject, cell)
    return Outcome(cell, len(subject.request.tokens), first_difference(subject, record))


def first_difference(subject: Subject, record: Record) -> str | None:
    """The first position at which two records of one request differ, with both rows; None when they are equal."""
    expected, prompt = subject.expected, len(subject.request.tokens)
    for i in range(max(len(expected.tokens), len(record.tokens))):
        one, other = drawn(expected, i), drawn(record, i)
        if one != other:
            return f"position {prompt + i}: {one} in the oracle, {other} here"
    if expected.state != record.state:
        return f"the final state: {expected.state[:16]} in the oracle, {record.state[:16]} here"
    return None


def drawn(record: Record, i: int) -> str:
    """The i-th reply token of a record and the logits it was drawn from, for people."""
    if i >= len(record.tokens):
        return "no token"
    return f"token {record.tokens[i]} of logits {record.logits[i][:16]}"
