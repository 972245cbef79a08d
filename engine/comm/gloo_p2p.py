"""P2P messages that outlive an engine; gloo shutdown at exit.

Messages between two ranks of a gloo group, kept until somebody has waited for them.

A receive that is freed before its message has come blocks the connection for good: gloo reads no
further there (torch 2.13), and whatever any other collective sends behind it waits. So messages
under way belong to their group and not to who started them: an engine may be dropped at any moment,
and another be made in its group.

The way out of a process that used gloo: its threads must be over before the interpreter is.

A gloo thread frees a collective's tensors after those who waited for it went on. One that does so
while Python is being finalized ends the process by std::terminate (torch 2.13: about one exit in
forty of a busy machine). The threads are over once nobody holds their process group.

`torch.distributed.nn.functional` holds it in the defaults of its functions when it is imported
behind the group's making, and the first step of any torch optimizer imports it.
"""

from __future__ import annotations

import atexit
import sys
from collections import Counter
from collections.abc import Callable
from threading import Thread
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor

_TAG_COUNT = 1 << 31  # gloo's are of 31 bits


class P2PWork:
    """One that is sent or received."""

    def __init__(self, work: dist.Work, mail: P2PChannel) -> None:
        self._work: dist.Work | None = work
        self._channel = ref(mail)  # no cycle: what is left goes as soon as the group does

    def wait(self) -> None:
        """Raises RuntimeError when the connection is lost, and when the group's time is over."""
        if self._work is None:  # gloo would never return from a second wait for a receive
            return
        self._work.wait()
        self._work = None
        if (mail := self._channel()) is not None:
            mail.in_flight.discard(self)


class P2PChannel:
    """Of one group. What nobody waits for goes with the group, or when `settle` finds it has come.

    Attributes:
        under_way: messages that nobody has waited for yet.
    """

    def __init__(self) -> None:
        self.in_flight: set[P2PWork] = set()
        self._tag = 0
        self._sent: Counter[int] = Counter()  # by peer, ever
        self._received: Counter[int] = Counter()

    def next_tag(self) -> int:
        """The next collective's. Ranks launch the same ones in the same order, so they agree on it,
        whichever engine a collective is of."""
        self._tag = (self._tag + 1) % _TAG_COUNT
        return self._tag

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        """Starts to send, to one who receives with this tag."""
        self._sent[peer] += 1
        return self._track(dist.isend(tensor, group=group, group_dst=peer, tag=tag))

    def recv(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        """Starts to receive, from one who sends with this tag."""
        self._received[peer] += 1
        return self._track(dist.irecv(tensor, group=group, group_src=peer, tag=tag))

    def drain_leftovers(self, group: dist.ProcessGroup) -> None:
        """Waits for what earlier engines of the group left, if all of it was sent. Collective.

        It was not where an engine was dropped in the middle of a step on one rank, before it had
        answered its peers.
        """
        if not self._tag:  # so on every rank: nothing was ever sent
            return
        rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        own = [[count[peer] for peer in ranks] for count in (self._sent, self._received)]
        card = torch.tensor(own)
        cards = [torch.empty_like(card) for _ in ranks]
        dist.all_gather(cards, card, group=group)
        sent, received = torch.stack(cards, 1)[:, :, rank].tolist()
        if [received, sent] == own:
            for message in tuple(self.in_flight):
                message.wait()

    def _track(self, work: dist.Work | None) -> P2PWork:
        if work is None:  # torch's answer to a rank that is not in the group, which this one is
            raise RuntimeError("this process has left the process group")
        message = P2PWork(work, self)
        self.in_flight.add(message)
        return message


def p2p_channel(group: dist.ProcessGroup) -> P2PChannel:
    """The one there is as long as the group is."""
    return _channels.setdefault(group, P2PChannel())


_channels: WeakKeyDictionary[dist.ProcessGroup, P2PChannel] = WeakKeyDictionary()

EXIT_LIMIT_S = 5.0
"""How long a collective that others never came to may hold up the end of the process."""


class GroupRef:
    """Somebody's hold on a process group, until the process ends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: list[dist.ProcessGroup] = [group]
        _group_refs.add(self)

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group[0]

    def release(self) -> None:
        self._group.clear()


_group_refs: WeakSet[GroupRef] = WeakSet()


def destroy_at_exit() -> None:
    """Of a default group that was made here: whoever makes it ends it, if the script does not."""
    atexit.register(_run_within_limit, _destroy_default_group)


def _destroy_default_group() -> None:
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
    _release_groups()


def _release_groups() -> None:
    for hold in tuple(_group_refs):
        hold.release()
    functional = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(functional).values() if functional else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(one, dist.ProcessGroup) for one in defaults):
            function.__defaults__ = tuple(
                None if isinstance(one, dist.ProcessGroup) else one for one in defaults
            )


def _run_within_limit(work: Callable[[], None]) -> None:
    """In a thread, for a group's end waits for its collectives."""
    thread = Thread(target=work, name="rayzero-leaving", daemon=True)
    thread.start()
    thread.join(EXIT_LIMIT_S)


atexit.register(_run_within_limit, _release_groups)
