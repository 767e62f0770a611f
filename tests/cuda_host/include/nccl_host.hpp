// What tests ask of the NCCL on the host beyond NCCL's own functions. Plain C, so that Python can call it, too.
#pragma once

extern "C" {

// Of this process.
int nccl_host_live_communicators();

// Groups that this process put on streams so far, captured ones included.
int nccl_host_num_launches();

// What was done that NCCL forbids, in words; empty if nothing was. Forgets it.
const char* nccl_host_take_misuse();

// All communicators of `rank` in this process meet an asynchronous error, with this ncclResult_t.
void nccl_host_fail_rank(int rank, int result);

// Transfers of `rank` in this process do not begin while it is held, as if its GPU hung.
void nccl_host_hold_rank(int rank, int held);

// How fast the sending side of each pair of ranks may go, in this process; 0 for as fast as it can.
void nccl_host_set_link(double bytes_per_second, double latency_seconds);

// How many times ncclCommGetAsyncError says ncclInProgress before a group is on its stream. 2 unless set.
void nccl_host_set_launch_polls(int polls);

}  // extern "C"
