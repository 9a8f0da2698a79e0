"""The finished pieces of a conversion, kept beside its target so that an interrupted one can go on."""

import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from isobit.errors import IsobitError

SUFFIX = ".converting"


def work_path_of(target: Path) -> Path:
    """Where the work folder of a target lies."""
    return target.absolute().with_name(target.absolute().name + SUFFIX)


class WorkFolder:
    """`TARGET.converting`: a record of what is being made, and one file a finished piece.

    Pieces appear whole or not at all. Only a conversion with an equal record goes on from them, one at a time.
    Raises IsobitError for another record, a folder in use, or a disk that is full.
    """

    def __init__(self, target: Path, record: Mapping[str, Any]):
        self.path = work_path_of(target)
        self._pieces = self.path / "pieces"
        try:
            self._pieces.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = open(self.path / "lock", "w")  # noqa: SIM115
        except OSError as error:
            raise IsobitError(f"{self.path} cannot be made ({error.strerror}); name another target") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise IsobitError(f"{self.path} is in use by another conversion; wait until it ends") from None
        try:
            self._check_record(json.loads(json.dumps(record)))
            self._discard_partial()
        except BaseException:
            self.close()
            raise

    @property
    def output(self) -> Path:
        """Where the finished folder is put together."""
        return self.path / "output"

    @property
    def nbytes(self) -> int:
        """The size of all finished pieces."""
        return sum(entry.stat().st_size for entry in os.scandir(self._pieces))

    def has(self, key: str) -> bool:
        """Whether a piece is finished."""
        return self._file(key).exists()

    def save(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep a finished piece for good."""
        partial = self._pieces / f".{key}.partial"
        try:
            with open(partial, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._file(key))
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise IsobitError(
                f"{self.path} cannot be written ({error.strerror}); finished tensors are kept there: mend that, then "
                "run the same command to go on"
            ) from None

    def load(self, key: str, name: str) -> np.ndarray:
        """One array of a finished piece."""
        try:
            with np.load(self._file(key), allow_pickle=False) as arrays:
                return arrays[name]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise IsobitError(
                f"{self._file(key)} is damaged; remove this file, then run the same command to go on"
            ) from None

    def fresh_output(self) -> Path:
        """An empty `output` folder."""
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir()
        return self.output

    def move_output(self, target: Path) -> None:
        """Give the finished `output` its name, on the disk for good; OSError if that fails."""
        for path in (*self.output.iterdir(), self.output):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.rename(self.output, target)

    def remove(self) -> None:
        """Delete the work folder with all pieces."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let another conversion use the folder."""
        self._lock.close()

    def __enter__(self) -> "WorkFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _file(self, key: str) -> Path:
        return self._pieces / f"{key}.npz"

    def _check_record(self, record: dict[str, Any]) -> None:
        file = self.path / "record.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = None
        except ValueError:
            raise IsobitError(f"{file} is damaged; remove the folder {self.path} to start afresh") from None
        if found is None:
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(record, indent=2), encoding="utf-8")
            os.replace(partial, file)
        elif found != record:
            raise IsobitError(
                f"{self.path} holds an unfinished conversion with another {_difference(found, record)}; run that one "
                "again, or remove the folder to start afresh"
            )

    def _discard_partial(self) -> None:
        for partial in self._pieces.glob(".*.partial"):
            partial.unlink(missing_ok=True)


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The first entry in which two records differ, with both values where they are short."""
    for key in sorted({*found, *expected}):
        if found.get(key) != expected.get(key):
            values = f"{found.get(key)} there, {expected.get(key)} now"
            return f"{key} ({values})" if len(values) < 80 else key
    return "record"
