// CUDA devices as the library sees them; no call here needs a driver to be present.
#pragma once
#include <cstdint>

namespace linattn::cuda {

struct DeviceInfo {
    char name[128];
    int64_t memory_bytes;
    int compute_capability, multiprocessors, driver_version, runtime_version;
    bool usable;  // compute capability 9.0, and a trivial kernel ran
};

int device_count();  // throws Error(Runtime) with the reason where there is none to use
DeviceInfo device_query(int device);
void require_hopper(const char *op, int device);  // throws Error(Unsupported) unless the device is of compute capability 9.0

int multiprocessors(int device);

}  // namespace linattn::cuda
