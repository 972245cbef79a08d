"""Waits that may be left out without a race, one by one, with the reason.

A test fails for an entry that no longer exists; the benchmark lists every other survivor.
"""

JUSTIFIED: dict[str, str] = {
    "engine/comm/backend.py AsyncWork.release: self.wait()": (
        "whoever releases a buffer has waited for its work before, and NCCL reads no buffer after; "
        "other backends' works do more"
    ),
    "engine/comm/collectives.py CollectiveWork.release: self.wait()": (
        "only if callbacks are left: whoever releases a buffer has waited before"
    ),
    "engine/comm/collectives.py CollectiveWork.release: self._work.release": (
        "as AsyncWork.release, on NCCL; between CPU ranks it waits for readers"
    ),
    "engine/compression/quantized.py PayloadBuffers.acquire: last.release()": (
        "the collective has been waited for; as AsyncWork.release"
    ),
    "engine/compression/powersgd.py PowerSGDReduce._reduce: pending.release()": (
        "the all-reduces have been waited for; as AsyncWork.release"
    ),
    "engine/offload/transfer.py _D2HCopy.release: self.reduced.release()": (
        "the reduction has been waited for; as AsyncWork.release"
    ),
    "engine/zero/lazy_weights.py LazyWeights._after_model: self.wait()": (
        "the vote waits for the same gathers before an update writes the weights; this ends what a "
        "script must know about them with forward"
    ),
}
