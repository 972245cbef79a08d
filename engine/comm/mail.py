"""Messages between two ranks of a gloo group, kept until somebody has waited for them.

A receive that is freed before its message has come blocks the connection for good: gloo reads no
further there (torch 2.13), and whatever any other collective sends behind it waits. So messages
under way belong to their group and not to who started them: an engine may be dropped at any moment,
and another be made in its group.
"""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

_TAGS = 1 << 31  # gloo's are of 31 bits


class Message:
    """One that is sent or received."""

    def __init__(self, work: dist.Work, mail: Mail) -> None:
        self._work: dist.Work | None = work
        self._mail = ref(mail)  # no cycle: what is left goes as soon as the group does

    def wait(self) -> None:
        """Raises RuntimeError when the connection is lost, and when the group's time is over."""
        if self._work is None:  # gloo would never return from a second wait for a receive
            return
        self._work.wait()
        self._work = None
        if (mail := self._mail()) is not None:
            mail.under_way.discard(self)


class Mail:
    """Of one group. What nobody waits for goes with the group, or when `settle` finds it has come.

    Attributes:
        under_way: messages that nobody has waited for yet.
    """

    def __init__(self) -> None:
        self.under_way: set[Message] = set()
        self._tag = 0
        self._sent: Counter[int] = Counter()  # by peer, ever
        self._received: Counter[int] = Counter()

    def tag(self) -> int:
        """The next collective's. Ranks launch the same ones in the same order, so they agree on it,
        whichever engine a collective is of."""
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def send(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Message:
        """Starts to send, to one who receives with this tag."""
        self._sent[peer] += 1
        return self._keep(dist.isend(tensor, group=group, group_dst=peer, tag=tag))

    def receive(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> Message:
        """Starts to receive, from one who sends with this tag."""
        self._received[peer] += 1
        return self._keep(dist.irecv(tensor, group=group, group_src=peer, tag=tag))

    def settle(self, group: dist.ProcessGroup) -> None:
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
            for message in tuple(self.under_way):
                message.wait()

    def _keep(self, work: dist.Work | None) -> Message:
        if work is None:  # torch's answer to a rank that is not in the group, which this one is
            raise RuntimeError("this process has left the process group")
        message = Message(work, self)
        self.under_way.add(message)
        return message


def mail_of(group: dist.ProcessGroup) -> Mail:
    """The one there is as long as the group is."""
    return _mails.setdefault(group, Mail())


_mails: WeakKeyDictionary[dist.ProcessGroup, Mail] = WeakKeyDictionary()
