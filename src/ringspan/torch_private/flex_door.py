"""Catch calls of PyTorch's own ``flex_attention`` while a block is open.

It is no operator but a Python function, which compares the lengths of its tensors with those of its BlockMask before it calls
anything that a torch function mode could answer for it; and whoever uses it has imported it by name. So while there is a block
open, in any thread, the function has other code, which asks whether the calling thread is in a block; if not, it does what it
always did (:mod:`ringspan.torch_private.flex_code`). With the last block its own code is back.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

Answer = Callable[..., Any]
# Who answers a call in the thread that makes it; None: nobody.
Find = Callable[[], Answer | None]


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's own, as it is without us. A call that was caught is said to be one of this function."""
    from ringspan.torch_private.flex_code import flex_attention as as_it_is

    return as_it_is(*args, **kwargs)


class _Door:
    """Open as long as any block has opened it more often than closed it.

    What a block has not opened it cannot close. Else one that a compiler has entered for it, without coming by here, would
    close the door on others when it is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: Counter[int] = Counter()  # by the id of the block, which cannot go away while it is open
        self.who_answers: Find = lambda: None
        self.why_stuck: str | None = None

    def open(self, block: object, find: Find) -> None:
        # Not before, since it imports PyTorch's compiler; but now, since a model may first meet FlexAttention in the block.
        from ringspan.torch_private import flex_code

        with self._lock:
            self._opened[id(block)] += 1
            self.who_answers, self.why_stuck = find, flex_code.why_not()
            if self.why_stuck is None:
                flex_code.swap_in()

    def close(self, block: object) -> None:
        from ringspan.torch_private import flex_code

        with self._lock:
            if id(block) not in self._opened:
                return
            self._opened -= Counter([id(block)])  # and forgets those that come to zero
            if not self._opened and self.why_stuck is None:
                flex_code.put_back()


door = _Door()
