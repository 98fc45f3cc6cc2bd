"""Where a run that several GPUs share is on disk; nothing here imports torch.

RUN.shards     its parts, until they are merged (shared_folder.py)
RUN            the merged run
"""

from pathlib import Path


def shards_of(run: Path) -> Path:
    """Return the folder of a run's parts; RUN.shards itself is returned unchanged."""
    return run if run.name.endswith(".shards") else run.with_name(f"{run.name}.shards")


def merged_at(folder: Path) -> Path:
    return folder.with_name(folder.name.removesuffix(".shards"))


def is_shared(run: Path) -> bool:
    """Return whether a run is shared out and not merged yet."""
    return (shards_of(run) / "plan.json").exists() and not (run / "run.json").exists()
