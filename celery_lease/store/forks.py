"""SQLite and forks: when a process forks, none of its connections may be open.

SQLite remembers in the process's own memory which locks of a file it holds. A child inherits
that memory, but not the locks: a transaction that another thread had open at that moment
looks to the child like one that never ends, and every claim in it is answered with "busy" for
ever. A worker forks whenever a pool process is replaced, while its loops write.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

__all__ = ["ForkGate"]


class ForkGate:
    """A context around each use of the connections; a fork waits for it, then closes them.

    One thread at a time is inside, and may enter again.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = weakref.WeakMethod(close)
        self._lock = threading.RLock()
        gate = weakref.ref(self)

        def call(step: Callable[[ForkGate], None]) -> Callable[[], None]:
            def registered() -> None:
                known = gate()
                if known is not None:
                    step(known)

            return registered

        os.register_at_fork(
            before=call(ForkGate._before),
            after_in_parent=call(ForkGate._in_parent),
            after_in_child=call(ForkGate._in_child),
        )

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def _before(self) -> None:
        self._lock.acquire()
        close = self._close()
        if close is not None:
            close()

    def _in_parent(self) -> None:
        self._lock.release()

    def _in_child(self) -> None:
        self._lock = threading.RLock()
