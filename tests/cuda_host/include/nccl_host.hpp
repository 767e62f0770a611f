// What tests ask of the NCCL on the host beyond NCCL's own functions. Plain C, so that Python can call it, too.
#pragma once

extern "C" {

// Of this process.
int nccl_host_live_communicators();

// Kernels of NCCL that this process put on streams so far, captured ones included: of a group, one per communicator.
int nccl_host_num_launches();

// Threads that this process started to put groups on streams.
int nccl_host_num_threads();

// Of the communicators that live, to a peer in one direction, two for a ring; and the device memory that NCCL would
// take for them.
long long nccl_host_num_connections();
long long nccl_host_connection_bytes();

// What was done that NCCL forbids, in words; empty if nothing was. Forgets it.
const char* nccl_host_take_misuse();

// All communicators of `rank` in this process meet an asynchronous error, with this ncclResult_t: those that were made
// or, with `is_of_split`, those that others were split into.
void nccl_host_fail_rank(int is_of_split, int rank, int result);

// Transfers of `rank` in this process do not begin while it is held, as if its GPU hung, and no split of it ends.
void nccl_host_hold_rank(int rank, int held);

// How fast the sending side of each pair of ranks may go, in this process; 0 for as fast as it can.
void nccl_host_set_link(double bytes_per_second, double latency_seconds);

// How many times ncclCommGetAsyncError says ncclInProgress before a group is on its stream. 2 unless set.
void nccl_host_set_launch_polls(int polls);

// While not 0, ncclCommGetAsyncError does not return. The second function: calls that it has kept so far.
void nccl_host_keep_error_queries(int keeps);
int nccl_host_num_kept_error_queries();

// Time that a group takes on the thread that puts it on its stream. 0 unless set.
void nccl_host_set_group_cost(int microseconds);

// How many of NCCL's kernels fit on a device beside each other. Those that are ready start in any order. 4 unless set.
void nccl_host_set_kernel_slots(int slots);

// What ncclGetVersion says; before 2.26.2 a thread's groups on two communicators are forbidden. 0: NCCL_HOST_VERSION of
// the environment, or 2.28.9.
void nccl_host_set_version(int version);

// The configuration of the last communicator of this process that was made or, with `is_of_split`, that another was
// split into. It is a zcomm::nccl::Config: what the release knows of it, the rest as undefined. Null before the first.
const void* nccl_host_last_config(int is_of_split);

// Channels by which each pair of ranks exchanges messages, in a node and between nodes, by NCCL's rule: on nodes of
// H100 with a network card of 400 Gbit/s for each, in the release that is played, with that configuration and the
// environment.
int nccl_host_channels_per_pair(int is_of_split, int num_nodes, int ranks_per_node);

// Channels by which a rank sends to all others of its node.
int nccl_host_channels_in_node(int is_of_split, int num_nodes, int ranks_per_node);

}  // extern "C"
