"""Point-to-point messages that outlive an engine, and the process group's shutdown at exit.

If a receive is freed before its message has arrived, gloo (torch 2.13) stops reading from the
connection, and does not notice its end either. So the process group, not the engine, owns messages
in flight: an engine may be dropped at any time, and another one be built in the same group.

At exit, gloo's threads must end before the interpreter does. A gloo thread frees a collective's
tensors after the collective's waiters have continued. If that happens while Python is being
finalized, the process dies by std::terminate (torch 2.13: about one exit in forty on a busy
machine). The threads end when the last reference to their process group is dropped, so the engine
has only weak references. `torch.distributed.nn.functional` has strong ones, in the defaults of its
functions, if it is imported after the group was created. The first step of any torch optimizer
imports it.
"""

from __future__ import annotations

import atexit
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.device import DeviceError, get_device, local_device
from rayzero.engine.torch_private import abort_default_group

_TAG_COUNT = 1 << 31  # gloo's tags have 31 bits
_LEFT_GROUP = "this process has left the process group"


class P2PWork:
    """One message that is being sent or received."""

    def __init__(self, work: dist.Work, channel: P2PChannel) -> None:
        self._work: dist.Work | None = work
        self._channel = ref(channel)  # no cycle: unfinished messages are freed with the group

    def wait(self) -> None:
        """Raises RuntimeError when the connection is lost, or after the group's timeout."""
        if self._work is None:  # gloo would never return from a second wait for a receive
            return
        self._work.wait()
        self._work = None
        if (channel := self._channel()) is not None:
            channel.in_flight.discard(self)


class P2PChannel:
    """The messages of one process group. `in_flight` has those that were not waited for. They are
    freed with the group, or by `drain_leftovers`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)
        self.in_flight: set[P2PWork] = set()
        self._tag = 0
        self._sent: Counter[int] = Counter()  # all messages so far, by peer
        self._received: Counter[int] = Counter()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Raises RuntimeError if it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(_LEFT_GROUP)
        return group

    def next_tag(self) -> int:
        """Returns the next collective's tag. The ranks agree on it, because all of them launch the
        same collectives in the same order, in every engine of the group."""
        self._tag = (self._tag + 1) % _TAG_COUNT
        return self._tag

    def send(self, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        """Starts to send. The peer receives with the same tag, in the order of sends."""
        self._sent[peer] += 1
        return self._track(dist.isend(tensor, group=self.group, group_dst=peer, tag=tag))

    def recv(self, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        """Starts to receive. The peer sends with the same tag."""
        self._received[peer] += 1
        return self._track(dist.irecv(tensor, group=self.group, group_src=peer, tag=tag))

    def drain_leftovers(self) -> None:
        """Waits for messages of the group's earlier engines, if all of them were sent. Collective.

        Some were not sent if one rank dropped its engine in the middle of a step.
        """
        if not self._tag:  # no rank has sent anything yet
            return
        rank, ranks = dist.get_rank(self.group), range(dist.get_world_size(self.group))
        own = [[count[peer] for peer in ranks] for count in (self._sent, self._received)]
        own_counts = torch.tensor(own)
        counts = [torch.empty_like(own_counts) for _ in ranks]
        dist.all_gather(counts, own_counts, group=self.group)
        sent_here, received_here = torch.stack(counts, 1)[:, :, rank].tolist()  # by the peers
        if [received_here, sent_here] == own:
            for message in tuple(self.in_flight):
                message.wait()

    def _track(self, work: dist.Work | None) -> P2PWork:
        if work is None:  # torch returns None on ranks outside the group
            raise RuntimeError(_LEFT_GROUP)
        message = P2PWork(work, self)
        self.in_flight.add(message)
        return message


def p2p_channel(group: dist.ProcessGroup) -> P2PChannel:
    """Returns the group's channel, which lives as long as the group."""
    return _channels.setdefault(group, P2PChannel(group))


_channels: WeakKeyDictionary[dist.ProcessGroup, P2PChannel] = WeakKeyDictionary()

EXIT_LIMIT_S = 5.0
"""How long a collective that other ranks never joined may delay the exit."""


def destroy_at_exit() -> None:
    """Registers the destruction of the default group, which the engine created, at exit. Nothing is
    destroyed if the script has done so."""
    atexit.register(_run_within_limit, _destroy_default_group)


def _destroy_default_group() -> None:
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        with suppress(DeviceError):  # peers may still be reading sent data
            get_device(local_device()).synchronize(EXIT_LIMIT_S / 2)
        abort_default_group()  # destroying it would wait for the peers
    elif dist.is_initialized():
        dist.destroy_process_group()
    _drop_default_arguments()


def _drop_default_arguments() -> None:
    """Drops the references to groups in `torch.distributed.nn.functional`."""
    functional = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(functional).values() if functional else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in defaults
            )


def _run_within_limit(work: Callable[[], None]) -> None:
    """Runs `work` in a thread for at most EXIT_LIMIT_S: ending a group awaits its collectives."""
    thread = Thread(target=work, name="rayzero-gloo-exit", daemon=True)
    thread.start()
    thread.join(EXIT_LIMIT_S)


atexit.register(_run_within_limit, _drop_default_arguments)
