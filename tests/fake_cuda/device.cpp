// Two CUDA devices without memory or kernels, for fake tensors: a CPU build of torch has no CUDA devices, and its
// autograd engine asks for their streams. Must be loaded before torch, which looks for these hooks only once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

constexpr c10::DeviceIndex kDevices = 2;

namespace at {
struct CUDAHooks : CUDAHooksInterface { // the name by which torch finds it
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

namespace c10 {
struct FakeGuard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device first() { return Device(DeviceType::CUDA, 0); }
  static Stream only() { return Stream(Stream::DEFAULT, first()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device exchangeDevice(Device) const override { return first(); }
  Device getDevice() const override { return first(); }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)
} // namespace c10
