// SPDX-License-Identifier: GPL-2.0-only
// A device whose streams do nothing before somebody waits for them, as the slowest GPU would. Its memory is the host's.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace {

thread_local c10::DeviceIndex current = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> streams;
std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::vector<std::function<void()>>> queues;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto kind = c10::DeviceType::PrivateUse1;
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kind, std::exchange(current, device.index())};
  }
  c10::Device getDevice() const override { return {kind, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return made(device, streams[device.index()]); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return made(stream.device(), std::exchange(streams[stream.device_index()], stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void synchronizeStream(const c10::Stream& stream) const override {
    for (auto& work : std::exchange(queues[{stream.device_index(), stream.id()}], {})) {
      work();
    }
  }
  static c10::Stream made(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("tensor", [](const at::Tensor& memory, c10::DeviceIndex index) {
    at::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(),
                        at::DataPtr(memory.data_ptr(), c10::Device(Guard::kind, index)));
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), memory.dtype());
    made.unsafeGetTensorImpl()->set_sizes_contiguous(memory.sizes());
    return made;
  }, "A tensor on the device in the memory of one of the processor's");
  module.def("use_stream", [](c10::DeviceIndex index, c10::StreamId id) { streams[index] = id; });
  module.def("fill", [](at::Tensor memory, double value, c10::DeviceIndex index) {
    queues[{index, streams[index]}].push_back([=] { memory.fill_(value); });
  }, "Queue it in the current stream");
}
