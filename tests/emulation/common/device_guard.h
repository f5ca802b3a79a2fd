#pragma once
namespace linattn::cuda {
struct DeviceGuard {
    explicit DeviceGuard(int) {}
};
}  // namespace linattn::cuda
