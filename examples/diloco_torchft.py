"""DiLoCo at sites that may vanish and return: torchft decides who takes part, zcomm sends pseudo-gradients in 4 bits.

torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 5000        at one place
TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/diloco_torchft.py --site 0         at each site, with its number

Needs torchft: pip install torchft. Version 0.2 was tried. A site prints a JSON object after every outer step.
"""

import datetime
import hashlib
import json
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import _DistributedBackendOptions
from torchft import Manager
from torchft.local_sgd import DiLoCo
from torchft.process_group import ProcessGroupWrapper
from train_gpt import GPT, load_corpus, sample

import zcomm
from zcomm.distributed.backend import create_backend
from zcomm.distributed.stats import stats_of


class ProcessGroupZcomm(ProcessGroupWrapper):
    """Group of torchft whose calls go over zcomm with some options. torchft makes it anew as sites come and go."""

    def __init__(self, options: zcomm.Options, timeout: datetime.timedelta) -> None:
        super().__init__(timeout)
        self._options, self._patience = options, timeout
        self._made = 0
        self._backend: Any = None

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        given: Any = _DistributedBackendOptions()
        given.store, given.group_rank, given.group_size = store, rank, world_size
        self._made += 1
        given.timeout, given.group_id = self._patience, f"torchft group {self._made} of this site"
        given.global_ranks_in_group = list(range(world_size))
        self._backend = create_backend(given, self._options)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self._backend)
        return group

    def abort(self, errored: bool = True) -> None:
        super().abort(errored)
        self.shutdown()

    def shutdown(self) -> None:
        super().shutdown()
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None

    def sent(self) -> dict[str, int]:
        """Return the bytes of the tensors that this group has reduced so far, and those that it sent for them."""
        of = stats_of(self._backend).all_reduce
        return {"reduced_bytes": of.bytes, "sent_bytes": of.wire_bytes}

    def getBackendName(self) -> str:
        return "torchft-zcomm"


def main(
    site: Annotated[int, typer.Option(help="Number of this site.")] = 0,
    outer_steps: int = 8,
    every: Annotated[int, typer.Option(help="Inner steps from one outer step to the next.")] = 20,
    format: str = "int4:64",
    timeout: Annotated[float, typer.Option(help="Seconds after which a site counts as lost.")] = 30.0,
    width: int = 64,
    layers: int = 2,
    sequence: int = 64,
    batch: int = 8,
) -> None:
    torch.manual_seed(0)
    model = GPT(width, layers, sequence)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupZcomm(zcomm.Options(all_reduce=format, strict=True), limit)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        use_async_quorum=False,
        replica_id=f"site{site}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=limit,
        quorum_timeout=limit,
    )
    text, _ = load_corpus()
    step = 0
    # One bucket for all parameters, as zcomm leaves all-reduces below its min_bytes exact.
    with DiLoCo(manager, [model], inner, sgd, sync_every=every, use_bucketization=True):
        while manager.current_step() < outer_steps:
            before = manager.current_step()
            loss = model(sample(text, batch, sequence, seed=1000 * step + site))
            loss.backward()
            inner.step()
            inner.zero_grad()
            step += 1
            if manager.current_step() > before:
                values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
                event = {
                    "outer_step": manager.current_step(),
                    "sites": manager.num_participants(),
                    "loss": round(loss.item(), 4),
                    "hash": hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16],
                    **group.sent(),
                }
                print(json.dumps(event), flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    typer.run(main)
