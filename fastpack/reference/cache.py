"""Log-probabilities on disk: a folder for one reference.

::

    folder/
      header.json                what they are of, how many there are, and each file's SHA-256
      8c1f...e2.parquet          some of them: `id`, 16 bytes in hex, and `log_prob`, float64, in nats

Files are written beside their place, then renamed into it: a header first, and each shard before the header that names
it. Whenever a run is killed, the folder holds what it held before its last shard, and is whole. Nothing in it is code,
and nothing that is not this reference's is overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastpack.errors import ReferenceCacheError
from fastpack.reference.identity import Identity

HEADER = "header.json"
FORMAT = "fastpack reference log-probabilities 1"


@dataclass(frozen=True)
class Stored:
    """What a cache holds: values by id, and whether the run that began it came to its end."""

    values: Mapping[bytes, float]
    complete: bool


@dataclass(frozen=True)
class ReferenceCache:
    """The cache of one reference in one folder, which need not be there yet.

    Methods raise :class:`ReferenceCacheError` where the folder holds something else, or something damaged.
    """

    folder: Path
    identity: Identity

    def load(self) -> Stored | None:
        """Everything in it, each file's digest checked; None where there is no cache yet."""
        header = self._header()
        if header is None:
            return None
        values: dict[bytes, float] = {}
        for shard in header["shards"]:
            values.update(self._read(shard))
        return Stored(values, header["complete"])

    def add(self, values: Mapping[bytes, float]) -> None:
        """Put these in too; on the disk when it returns."""
        header = self._header()
        if header is None:
            header = self._new()
            self._seal(header)  # a folder that holds a shard alone is taken for a damaged cache
        if values:
            data = _written(values)
            digest = hashlib.sha256(data).hexdigest()
            shard = {"file": f"{digest[:32]}.parquet", "sha256": digest, "rows": len(values)}
            self._put(str(shard["file"]), data)
            header["shards"] = [one for one in header["shards"] if one != shard] + [shard]
        self._seal(header)

    def finish(self) -> None:
        """Note that whatever was wanted is in it."""
        header = self._header() or self._new()
        header["complete"] = True
        self._seal(header)

    def _new(self) -> dict[str, Any]:
        import torch
        import transformers

        from fastpack import __version__

        return {
            "format": FORMAT,
            "key": self.identity.key,
            "model": dict(self.identity.name),
            "parts": dict(self.identity.parts),
            "made": {
                "on": datetime.now(UTC).isoformat(timespec="seconds"),
                "fastpack": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "complete": False,
            "shards": [],
        }

    def _header(self) -> dict[str, Any] | None:
        path = self.folder / HEADER
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if self.folder.is_dir() and any(not one.name.startswith(".") for one in self.folder.iterdir()):
                raise ReferenceCacheError(
                    f"{self.folder} is not empty and has no {HEADER}: it is no cache, or not all of one. Pass a new "
                    "folder."
                ) from None
            return None
        except (NotADirectoryError, UnicodeDecodeError) as error:
            raise ReferenceCacheError(f"{path} can't be read: {error}. Pass a folder for the cache.") from error
        header = self._parsed(text)
        differences = self.identity.differences(header["parts"])
        if differences:
            raise ReferenceCacheError(
                f"{self.folder} holds log-probabilities of another reference ({_named(header['model'])}, made on "
                f"{header['made']['on']}) than this one ({_named(self.identity.name)}): {'; '.join(differences)}. Pass "
                "another folder, or the model and settings that it was made with. Nothing was changed."
            )
        return header

    def _parsed(self, text: str) -> dict[str, Any]:
        path = self.folder / HEADER
        try:
            header = json.loads(text)
        except json.JSONDecodeError as error:
            raise ReferenceCacheError(f"{path} is damaged: {error}. {_MEND}") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ReferenceCacheError(f"{path} is not one of {FORMAT!r}. Pass another folder.")
        if header.pop("sha256", None) != _digest(header):
            raise ReferenceCacheError(f"{path} was changed after it was written. {_MEND}")
        return header

    def _read(self, shard: Mapping[str, Any]) -> dict[bytes, float]:
        import pyarrow.parquet

        path = self.folder / shard["file"]
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise ReferenceCacheError(f"{path} is gone, which {HEADER} names. {_MEND}") from error
        if hashlib.sha256(data).hexdigest() != shard["sha256"]:
            raise ReferenceCacheError(f"{path} is truncated, or was changed after it was written. {_MEND}")
        table = pyarrow.parquet.read_table(BytesIO(data))
        return dict(zip(map(bytes.fromhex, table["id"].to_pylist()), table["log_prob"].to_pylist(), strict=True))

    def _seal(self, header: dict[str, Any]) -> None:
        header["count"] = sum(shard["rows"] for shard in header["shards"])
        self._put(HEADER, json.dumps({**header, "sha256": _digest(header)}, indent=1).encode())

    def _put(self, name: str, data: bytes) -> None:
        """Write a file so that it is there wholly or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{name}.{uuid4().hex}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        finally:
            temporary.unlink(missing_ok=True)


_MEND = "Put it back, or pass a new folder to compute anew. Nothing was changed."


def _named(model: Mapping[str, Any]) -> str:
    told = [model["class"], model["loaded_from"], model["revision"]]
    return f"{' '.join(str(one) for one in told if one)}, {model['parameters']:,} parameters"


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _written(values: Mapping[bytes, float]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "id": pyarrow.array([one.hex() for one in values], pyarrow.string()),
        "log_prob": pyarrow.array(list(values.values()), pyarrow.float64()),
    }
    file = BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()
