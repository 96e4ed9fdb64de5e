"""Ranks other than 0: each holds its part of every engine and does what rank 0 tells it.

`python -m specdec.decode.ranks.follower STORE` is how rank 0 starts one; a launcher's come
here from specdec-run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.decode.ranks.processes import LOST_STATUS, exchange_status, join_group, open_store
from specdec.errors import SpecDecError, summarize
from specdec.system import logs
from specdec.system.mpi import find_launch

if TYPE_CHECKING:
    from specdec.decode.ranks.messages import Message
    from specdec.engine.group import Group


class Follower:
    """Decoders and caches of one rank, by the numbers that rank 0 gave them."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._objects: dict[int | None, Any] = {}

    def serve(self) -> None:
        """Execute rank 0's calls until it sends the end."""
        import torch

        from specdec.decode.ranks.leader import unpack_forward
        from specdec.decode.ranks.messages import receive

        with torch.inference_mode():
            while True:
                message = receive(self.group)
                values, arrays = message.values, message.arrays
                for handle in values["dropped"]:
                    self._objects.pop(handle, None)
                decoder: Any = self._objects.get(values.get("decoder"))
                if message.call == "end":
                    return
                if message.call == "load":
                    self._load(message)
                elif message.call == "make_cache":
                    cache = decoder.make_cache(values["num_rows"], values["num_positions"])
                    self._objects[values["cache"]] = cache
                elif message.call == "forward":
                    cache = self._objects[values["cache"]]
                    decoder.forward(unpack_forward(arrays, cache), cache)
                elif message.call == "embed":
                    names = "tokens", "positions"
                    decoder.embed(*(torch.from_numpy(arrays[n]).to(decoder.device) for n in names))
                else:
                    assert message.call == "compute_logits", message.call
                    shape, dtype, device = values["shape"], decoder.dtype, decoder.device
                    hidden = torch.empty(shape, dtype=dtype, device=device)
                    self.group.broadcast(hidden)
                    decoder.compute_logits(hidden)

    def _load(self, message: Message) -> None:
        import torch

        from specdec.decode.ranks.part import load_decoder

        values = message.values
        problem = None
        try:
            self._objects[values["decoder"]] = load_decoder(
                Path(values["folder"]), torch.device(values["device"]), self.group
            )
        except SpecDecError as error:
            problem = error.message, error.hint
        except (OSError, RuntimeError) as error:  # no file, no memory
            problem = (
                f"rank {self.group.rank}: {summarize(error)}",
                "free memory, or use more ranks",
            )
        exchange_status(self.group, problem)


def follow_launcher() -> None:
    """Be a launcher's rank until rank 0 is done; end with a status where it ends otherwise."""
    _follow(None)


def _follow(store_path: str | None) -> None:
    from specdec.engine.group import PeerLost

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = find_launch()
    assert launch is not None
    rank, size, store = launch.rank, launch.size, None
    if store_path is not None:
        store = open_store(store_path, size)
        store.set(f"rank{rank}", "here")
    try:
        Follower(join_group(rank, size, store)).serve()
    except PeerLost:
        # Rank 0 tells why; and torch.distributed has nothing left to end in good order.
        os._exit(LOST_STATUS)
    import torch.distributed

    torch.distributed.destroy_process_group()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serve as a process that rank 0 started: its stdin closes when rank 0 is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.set_up()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _follow(sys.argv[1])


if __name__ == "__main__":
    main()
