// Transports that compare what arrives with what was sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "zcomm/transport.hpp"

namespace zcomm {

// Returns a checksum of bytes. A change by accident goes unnoticed with a probability of about 2^-32. An attacker can
// make one. It is the hash of HostLosslessCodec, with the length.
std::uint64_t checksum(const std::byte* data, std::size_t num_bytes);

// Makes a transport whose messages carry checksums, over `inner`, which must move bytes on the host. All ranks must
// make one, with the same `every`: one of that many calls between two ranks has checksums, each time another one.
//
// Checksums of the messages of one start() to a peer follow them, as one message more. start() computes them, so they
// cover what happens to a message from then on until Transfer::wait() returns: on the network, in memory that ranks
// share, and in the buffers of both ranks.
// Transfer::wait() throws CorruptedWireError that names the sender and the message if bytes differ.
// Throws ArgumentError if transfers of `inner` are work on a GPU's stream, or if `every` is 0.
//
// Example:
//   Communicator communicator(make_checked_transport(std::move(transport)), topology, make_cpu_codec(),
//                             make_host_workspace());
std::unique_ptr<Transport> make_checked_transport(std::unique_ptr<Transport> inner, std::uint64_t every = 1);

}  // namespace zcomm
