// All public headers. Include it, or only those that you need: communicator.hpp runs collectives, gather.hpp,
// operation.hpp and exchange.hpp make them, and codec.hpp, transport.hpp, cuda.hpp and nccl.hpp make the parts of a
// communicator.
#pragma once

#include "zcomm/block_format.hpp"
#include "zcomm/call.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/checked_transport.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/dtype.hpp"
#include "zcomm/error.hpp"
#include "zcomm/exchange.hpp"
#include "zcomm/gather.hpp"
#include "zcomm/link.hpp"
#include "zcomm/nccl.hpp"
#include "zcomm/operation.hpp"
#include "zcomm/plan.hpp"
#include "zcomm/shard_mark.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/trace.hpp"
#include "zcomm/transport.hpp"
#include "zcomm/wire_layout.hpp"
#include "zcomm/workspace.hpp"
