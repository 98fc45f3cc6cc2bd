"""Where a run that is measured in parts is on disk; nothing here imports torch.

RUN.parts      its parts, until it is whole (shared_folder.py)
RUN            the run
"""

from pathlib import Path

from sparsebench.errors import ResultError


def parts_of(run: Path) -> Path:
    """Return the folder of a run's parts; RUN.parts itself is returned unchanged.

    Raises ResultError if an older version left parts there, or in RUN.shards.
    """
    if run.name.endswith(".parts"):
        return run
    folder, older = run.with_name(f"{run.name}.parts"), run.with_name(f"{run.name}.shards")
    if folder.exists() and not (folder / "plan.json").exists():
        older = folder
    if older.exists() and not (run / "run.json").exists():
        expected = (
            f"expected parts in {folder.name} with plan.json, found those of an older version"
        )
        raise ResultError(f"{older}: {expected}; finish them with it, or remove the folder")
    return folder


def merged_at(folder: Path) -> Path:
    return folder.with_name(folder.name.removesuffix(".parts"))


def is_shared(run: Path) -> bool:
    """Return whether a run is in parts and not whole yet."""
    return parts_of(run).exists() and not (merged_at(run) / "run.json").exists()


def pieces_of(run: Path, part: int | str = "*") -> list[Path]:
    """Return the run directories of a part, or of all parts, the oldest of each part first."""
    pieces = [file.parent for file in parts_of(run).glob(f"{part}/*/run.json")]
    return sorted(pieces, key=lambda piece: (int(piece.parent.name), int(piece.name)))
