"""Digests of the tensors of the checkpoint that another was made from, after their casts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.dtypes import DType
from ema_ckpt.core.errors import AccessError, EmaCkptError
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.reading.cast import Caster, import_all
from ema_ckpt.reading.digests import compute_digest, recorded_digest
from ema_ckpt.runtime import executor
from ema_ckpt.runtime.executor import Workers, dump_json
from ema_ckpt.storage.files import is_url

BLOCK_NBYTES = 512 << 10
_SECONDS_PER_BYTE, _SECONDS_PER_TENSOR = 0.3e-9, 50e-6  # of one worker


class DigestJob(NamedTuple):
    """Compute the digest of a source's tensor, after the cast to `dtype`."""

    tensor: Tensor
    dtype: DType

    @property
    def nbytes(self) -> int:
        """The bytes that are read."""
        return self.tensor.nbytes

    @property
    def key(self) -> tuple[str, str]:
        """What its result is kept by."""
        return self.tensor.name, self.dtype.name


class OriginDigests:
    """The work of computing digests; results by tensor and type, with what an error says."""

    def __init__(self, origin: Catalog) -> None:
        self.origin = origin
        self.results: dict[tuple[str, str], tuple[int | None, Sequence[Any] | None]] = {}

    def compute(
        self,
        jobs: Sequence[DigestJob],
        threads: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Compute those digests that are not known yet."""
        new = {job.key: job for job in jobs if job.key not in self.results}
        if new:
            executor.run(self, [new.values()], self._workers(new.values(), threads), progress)

    def _workers(self, jobs: Collection[DigestJob], threads: int) -> Workers:
        if is_url(self.origin.source.root):
            return Workers(threads)
        import_all((job.tensor.dtype, job.dtype) for job in jobs)
        free_seconds = sum([job.nbytes for job in jobs]) * _SECONDS_PER_BYTE
        return Workers.fit(min(threads, len(jobs)), free_seconds, len(jobs) * _SECONDS_PER_TENSOR)

    def start_worker(self) -> Callable[[DigestJob], int]:
        """Return what one worker computes a digest with."""
        reader = BoxReader(BLOCK_NBYTES)

        def compute(job: DigestJob) -> int:
            try:
                self.results[job.key] = (self.digest(job.tensor, job.dtype, reader), None)
            except AccessError:
                raise
            except EmaCkptError as error:
                failure = (error.code, str(error), error.tensor, error.file)
                self.results[job.key] = (None, failure)
            return job.nbytes

        return compute

    def digest(self, tensor: Tensor, dtype: DType, reader: BoxReader) -> int | None:
        """Return the recorded digest, or compute it; None for types that do not cast."""
        cast = None
        if dtype == tensor.dtype:
            recorded = recorded_digest(self.origin, tensor)
            if recorded is not None:
                return recorded
        elif dtype.is_castable and tensor.dtype.is_castable:
            cast = Caster(tensor.dtype, dtype).cast
        else:
            return None
        return compute_digest(locate(self.origin, tensor), reader, cast)

    def dump(self) -> bytes:
        """Return the results of a child process."""
        return dump_json([[*key, *result] for key, result in self.results.items()])

    def merge(self, dumped: bytes) -> None:
        """Take in the results of a child process."""
        for name, dtype, digest, failure in json.loads(dumped):
            self.results[name, dtype] = (digest, failure)

    def reset(self) -> None:
        """Forget all results."""
        self.results.clear()
