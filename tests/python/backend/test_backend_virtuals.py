"""Every virtual function of torch's Backend is decided: a release that brings another one fails here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import expect
from support.worlds import run

import zcomm
from zcomm.distributed.binding import TORCH

CPU = torch.device("cpu")
SOURCES = Path(__file__).resolve().parents[3] / "python/c10d"

MADE = "zcomm makes it"
EXACT = "the inner groups make it, exactly"
NCCL = "the inner group of GPU tensors makes it; without a GPU an error"
ALIAS = "torch calls the function of the older name, which is overridden"
REFUSED = "torch's default, an error that names the backend"
NO = "torch's default: no"
ELASTIC = "groups with enable_reconfigure make it: ElasticGroup; others have torch's default, no or an error"
PLAIN = "torch's default does what is needed"

# Name -> since which minor release of torch 2, and how it is decided.
DECIDED = {
    "supportsSplitting": (11, MADE),
    "supportsCoalescing": (11, MADE),
    "supportsTimeEstimation": (11, NO),  # a simulated call would not be compressed
    "startTimeEstimate": (15, REFUSED),
    "endTimeEstimate": (15, REFUSED),
    "supportsShrinking": (11, NO),
    "shrink": (11, REFUSED),
    "setTimeout": (11, MADE),
    "addEphemeralTimeout": (14, PLAIN),  # ignored, as by Gloo: set_timeout() reaches compressed calls
    "supportsReconfigure": (14, ELASTIC),
    "get_reconfigure_handle": (14, ELASTIC),
    "reconfigure": (14, ELASTIC),
    "supportsWindow": (14, NO),
    "new_window": (14, REFUSED),
    "supportsAbortHooks": (15, NO),
    "registerAbortHook": (14, REFUSED),
    "unregisterAbortHook": (14, REFUSED),
    "supportsCompletionHooks": (15, NO),
    "registerCompletionHook": (15, REFUSED),
    "unregisterCompletionHook": (15, REFUSED),
    "registerOnCompletionHook": (11, REFUSED),
    "isInitialized": (15, PLAIN),  # yes: a split connects by itself
    "startCoalescing": (11, MADE),
    "endCoalescing": (11, MADE),
    "getBackendName": (11, MADE),
    "getBackendOptions": (11, MADE),
    "clone": (14, MADE),  # of Backend::Options
    "broadcast": (11, MADE),
    "allreduce": (11, MADE),
    "allreduce_sparse": (11, EXACT),
    "allreduce_coalesced": (11, MADE),
    "reduce": (11, EXACT),
    "allgather": (11, MADE),
    "_allgather_base": (11, MADE),
    "all_gather_single": (14, ALIAS),
    "allgather_coalesced": (11, EXACT),
    "allgather_into_tensor_coalesced": (11, MADE),
    "all_gather_single_coalesced": (14, ALIAS),
    "gather": (11, MADE),
    "gather_single": (14, MADE),
    "gather_into_tensor": (14, PLAIN),  # calls gather_single
    "scatter": (11, MADE),
    "reduce_scatter": (11, MADE),
    "_reduce_scatter_base": (11, MADE),
    "reduce_scatter_single": (14, ALIAS),
    "reduce_scatter_tensor_coalesced": (11, MADE),
    "reduce_scatter_single_coalesced": (14, ALIAS),
    "alltoall_base": (11, MADE),
    "all_to_all_single": (14, ALIAS),
    "alltoall": (11, MADE),
    "send": (11, MADE),
    "recv": (11, MADE),
    "recvAnysource": (11, MADE),
    "barrier": (11, EXACT),
    "monitoredBarrier": (11, EXACT),
    "setSequenceNumberForGroup": (11, EXACT),
    "getSequenceNumberForGroup": (11, MADE),
    "waitForPendingWorks": (11, MADE),
    "enableCollectivesTiming": (11, EXACT),
    "split": (11, MADE),
    "merge": (11, REFUSED),
    "setGroupUid": (11, MADE),
    "getBoundDeviceId": (14, PLAIN),  # plain functions before
    "setBoundDeviceId": (14, PLAIN),
    "eagerConnectSingleDevice": (11, EXACT),
    "getError": (11, MADE),
    "getMemAllocator": (11, NCCL),
    "supportsTensorAlloc": (11, NO),  # NCCL's needs a connected exact group; FSDP2 then takes torch's memory
    "allocateTensor": (11, REFUSED),
    "abort": (11, MADE),
    "shutdown": (11, MADE),
    "suspend": (12, NCCL),
    "resume": (12, NCCL),
    "getMemoryStats": (12, NCCL),
}


def virtuals() -> set[str]:
    """Of torch's class; its destructor is none that a backend decides about."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/Backend.hpp"
    text = re.sub(r"//.*", "", header.read_text())
    found = re.findall(r"\bvirtual\s+(?!~)[\w:<>,&*\s]*?[\s&*>](\w+)\s*\(", text)
    assert len(found) == len(re.findall(r"\bvirtual\b(?!\s*~)", text))
    return set(found)


def test_every_virtual_of_this_torch_is_decided() -> None:
    found = virtuals()
    assert not found - DECIDED.keys(), "undecided: the table tells how others are"
    assert {name for name, (minor, _) in DECIDED.items() if (2, minor) <= TORCH} == found


def test_what_zcomm_makes_is_overridden() -> None:
    sources = [SOURCES / "group/process_group.hpp", SOURCES / "calls/options.hpp"]
    text = "".join(source.read_text() for source in sources)
    overridden = set(re.findall(r"\b(\w+)\([^;{}]*\)(?:\s*const)?\s+override\b", text))
    assert {name for name, (_, how) in DECIDED.items() if how in (MADE, EXACT, NCCL)} == overridden


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a process without a GPU says")
def test_what_nccl_alone_has_is_refused_by_name_without_a_gpu() -> None:
    def body() -> None:
        world: Any = dist.group.WORLD
        group = world._get_backend(CPU)
        text = ": not supported by the backend 'zcomm' on CPUs: it is NCCL's, and there is no GPU"
        expect(RuntimeError, "mem_allocator" + text, lambda: group.mem_allocator)
        if TORCH >= (2, 12):
            expect(RuntimeError, "suspend" + text, group.suspend)
            expect(RuntimeError, "resume" + text, group.resume)
            expect(RuntimeError, "memory_stats" + text, group.memory_stats)
        for name in ("register_mem_pool", "deregister_mem_pool"):
            expect(AttributeError, name + text, lambda: getattr(group, name))  # noqa: B023
            assert not hasattr(group, name)
        for name in ("comm_split_count", "_is_initialized", "_group_start", "uid"):
            expect(AttributeError, f"{name}: not supported by the backend 'zcomm'", lambda: getattr(group, name))  # noqa: B023
        assert not group.supports_tensor_alloc(CPU)
        assert not group.supports_shrinking
        expect(RuntimeError, "Backend zcomm does not support shrink", lambda: group.shrink([1]))
        assert group.perform_nocolor_split(CPU) is None

    run(body)


def gather_single() -> None:
    rank, own = dist.get_rank(), torch.arange(6.0).view(2, 3) + 10 * dist.get_rank()
    whole = torch.zeros(12) if rank == 1 else None
    dist.gather_single(own, whole, dst=1)  # type: ignore[attr-defined]
    if whole is not None:
        assert whole.tolist() == [*range(6), *range(10, 16)]
        expect(ValueError, "output: expected 2 times the 6 elements", lambda: dist.gather_single(own, whole[1:], dst=1))  # type: ignore[attr-defined]


@pytest.mark.skipif(TORCH < (2, 14), reason="torch 2.14 brought the call")
@pytest.mark.parametrize("options", [None, zcomm.Options(exchanges="exact")], ids=["defaults", "exact"])
def test_gather_single_is_a_gather_into_one_tensor(options: Any) -> None:
    run(gather_single, options=options)
