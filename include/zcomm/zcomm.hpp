// Everything.
#pragma once

#include "zcomm/block_format.hpp"
#include "zcomm/call_check.hpp"
#include "zcomm/codec.hpp"
#include "zcomm/collectives.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/cuda.hpp"
#include "zcomm/dtype.hpp"
#include "zcomm/error.hpp"
#include "zcomm/nccl.hpp"
#include "zcomm/stream.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/topology.hpp"
#include "zcomm/transport.hpp"
#include "zcomm/wire_layout.hpp"
#include "zcomm/workspace.hpp"
