"""A process that calls a function of the user: its output, its folder, its threads, its device."""

from __future__ import annotations

import os
import sys

import torch

from rayzero.engine.compiling import defer_dynamo_import
from rayzero.engine.device import device_count
from rayzero.engine.errors import ConfigError
from rayzero.workers.messages import LogLine, WorkerInfo, WorkerSpec
from rayzero.workers.nccl_settings import check_nccl_settings
from rayzero.workers.output import LineTee, Outbox, tee_output
from rayzero.workers.worker_status import WorkerStatus


class UserProcess:
    """A process that calls a user's function. Output tees and outbox live as long as that."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._outbox = Outbox()
        self._tees: tuple[LineTee, ...] = ()

    log_role = ""
    """The role of this process in the log; empty for a rank."""

    @property
    def log_number(self) -> int:
        """The number of this process in the log: its rank, or its number in its role."""
        raise NotImplementedError

    def status(self, info: WorkerInfo, group: str) -> WorkerStatus:
        """Returns the `WorkerStatus`. Only ranks have generations."""
        return WorkerStatus(info, group)

    @property
    def members(self) -> tuple[WorkerInfo, ...]:
        """The members of the newest generation, by rank."""
        return ()

    def begin_output(self) -> None:
        """Passes on what the process prints from now on, and prepares what user code finds."""
        self._tees = tee_output(self._post_log)
        threads = os.environ.get("OMP_NUM_THREADS", max(1, int(self._spec.cpus)))
        torch.set_num_threads(int(threads))
        defer_dynamo_import()
        self._enter_working_dir()

    def _select_device(self) -> torch.device:
        if self._spec.gpus <= 0:
            return torch.device("cpu")
        check_nccl_settings(os.environ)
        if not device_count():
            raise ConfigError(
                f"workers.gpus: {self._spec.gpus:g}, but torch {torch.__version__} finds no CUDA"
                " device on the worker's node",
                allowed="`workers.gpus: 0`, or nodes with a CUDA device and a torch built for CUDA",
                fix="correct workers.gpus in the job file, or install torch for CUDA on the nodes",
            )
        return torch.device("cuda", 0)  # Ray makes only the worker's own device visible

    def _enter_working_dir(self) -> None:
        folder = self._spec.working_dir
        try:
            os.chdir(folder)
        except OSError as error:
            self._post_log(
                "stderr",
                f"the submitter's working directory {folder} does not exist on this node "
                f"({error.strerror}): relative paths start at {os.getcwd()}",
            )
        sys.path.insert(0, folder)
        sys.path.extend(path for path in self._spec.import_paths if path not in sys.path)

    def _post_log(self, stream: str, text: str) -> None:
        self._outbox.post(LogLine(self.log_number, stream, text, self.log_role))
