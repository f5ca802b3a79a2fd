// Makes a device current for a scope and restores the caller's afterwards.
#pragma once
#include "common/check_cuda.h"

namespace linattn::cuda {

class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
        if (device == previous_) return;
        check_cuda(cudaSetDevice(device), "cudaSetDevice");
        changed_ = true;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard &) = delete;
    DeviceGuard &operator=(const DeviceGuard &) = delete;

  private:
    int previous_ = 0;
    bool changed_ = false;
};

}  // namespace linattn::cuda
