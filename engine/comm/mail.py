"""Messages between two ranks of a gloo group, kept until somebody has waited for them.

A receive that is freed before its message has come blocks the connection for good: gloo reads no
further there (torch 2.13), and whatever any other collective sends behind it waits. So messages
under way belong to their group and not to who started them: an engine may be dropped at any moment,
and another be made in its group.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

_TAGS = 1 << 31  # gloo's are of 31 bits


class Message:
    """One that is sent or received. Wait once: a second wait for a receive never returns."""

    def __init__(self, work: dist.Work, mail: Mail) -> None:
        self._work = work
        self._mail = ref(mail)  # no cycle: what is left goes as soon as the group does

    def wait(self) -> None:
        """Raises RuntimeError when the connection is lost, and when the group's time is over."""
        self._work.wait()
        if (mail := self._mail()) is not None:
            mail.under_way.discard(self)


class Mail:
    """Of one group. All that nobody waits for goes with the group: a token is a few bytes.

    Attributes:
        under_way: messages that nobody has waited for yet.
    """

    def __init__(self) -> None:
        self.under_way: set[Message] = set()
        self._tag = 0

    def tag(self) -> int:
        """The next collective's. Ranks launch the same ones in the same order, so they agree on it,
        whichever engine a collective is of."""
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def keep(self, work: dist.Work | None) -> Message:
        """A message that was just started."""
        if work is None:  # torch's answer to a rank that is not in the group, which this one is
            raise RuntimeError("this process has left the process group")
        message = Message(work, self)
        self.under_way.add(message)
        return message


def mail_of(group: dist.ProcessGroup) -> Mail:
    """The one there is as long as the group is."""
    return _mails.setdefault(group, Mail())


_mails: WeakKeyDictionary[dist.ProcessGroup, Mail] = WeakKeyDictionary()
