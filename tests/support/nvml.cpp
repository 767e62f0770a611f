// A libnvidia-ml of one GPU, which tells of its fabric what the compiler is told: STATE, STATUS, UUID and RESULT.
// WITHOUT_FABRIC leaves out what older drivers do not have.
#include <cstring>

namespace {

constexpr unsigned kSuccess = 0, kArgument = 2, kVersion = 25;
int gpu;

struct Fabric {
  unsigned char cluster_uuid[16];
  unsigned status;
  unsigned clique_id;
  unsigned char state;
};

unsigned fill(const void* device, Fabric& fabric) {
  if (device != &gpu) return kArgument;
  if (RESULT != kSuccess) return RESULT;
  std::memset(fabric.cluster_uuid, UUID, sizeof(fabric.cluster_uuid));
  fabric.status = STATUS;
  fabric.clique_id = 5;
  fabric.state = STATE;
  return kSuccess;
}

}  // namespace

extern "C" {

unsigned nvmlInit_v2() { return kSuccess; }

unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &gpu;
  return index == 0 ? kSuccess : kArgument;
}

#ifndef WITHOUT_FABRIC
struct FabricV2 {
  unsigned version;
  Fabric fabric;
  unsigned health_mask;
};
unsigned nvmlDeviceGetGpuFabricInfoV(void* device, FabricV2* info) {
  if (info->version != 0x02000024) return kVersion;
  info->health_mask = ~0u;
  return fill(device, info->fabric);
}
#endif
}
