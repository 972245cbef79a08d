"""Waits that may be left out without a race, one by one, with the reason.

A test fails for an entry that no longer exists; the benchmark lists every other survivor.
"""

JUSTIFIED: dict[str, str] = {
    "engine/comm/collectives.py CollectiveWork.release: self.wait()": (
        "only if callbacks are left: on a device, whoever adds some also waits before the release"
    ),
    "engine/compression/quantized.py PayloadBuffers.acquire: last.release()": (
        "the collective has been waited for, and NCCL reads no buffer after; other backends' works "
        "do more"
    ),
    "engine/compression/powersgd.py PowerSGDReduce._reduce: self._last_reduce.wait()": (
        "units are launched in one order, and the reducer has waited for all launches but the last "
        "few, at most one of each unit (`GradBufferPool.max_count`)"
    ),
    "engine/compression/powersgd.py PowerSGDReduce._reduce: pending.release()": (
        "the all-reduces have been waited for; as PayloadBuffers.acquire"
    ),
    "engine/offload/transfer.py HostShardGather.gather: previous.release()": (
        "the gather has been waited for, and NCCL reads no buffer after; between CPU ranks it "
        "waits for readers"
    ),
    "engine/state/training.py TrainingState.updating: self.before_write()": (
        "before an update the vote and `step_requests` have made the host wait for all that it "
        "waits for; what else writes the state has no vote before it"
    ),
    "workers/state_copy.py StateCopier._start: self.settle()": (
        "the vote has settled the step before (`step_requests`); this is for an error in that order"
    ),
    "workers/state_copy.py StateCopier.close: job.done.wait(limit_s)": (
        "the join waits for the same, but the thread would give up a step that is finished: "
        "tests/workers/test_state_copy.py lets one be committed"
    ),
    "workers/state_copy.py StateCopier.close: self._thread.join(limit_s)": (
        "what the thread does is over with `done`; this ends the thread, for which "
        "tests/workers/test_state_copy.py looks"
    ),
}
