// SPDX-License-Identifier: GPL-2.0-only
// A device whose streams do nothing before somebody waits for them, as the slowest GPU would. Its memory is the host's.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
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
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    for (c10::StreamId id = 0; id < 10; ++id) {
      synchronizeStream(made({kind, index}, id));
    }
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return made(device, 9); }
  void record(void**, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    synchronizeStream(stream);
  }
  void block(void*, const c10::Stream&) const override {}
  static c10::Stream made(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
};

std::atomic<int> copies{0};

// The memory of a tensor on the device, as the processor sees it.
at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.dtype());
}

// In the stream that is current; to the host it waits, as a GPU's copy to memory that is not pinned does.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const Guard guard;
  const auto stream = guard.getStream(from.is_cpu() ? to.device() : from.device());
  ++copies;
  queues[{stream.device_index(), stream.id()}].push_back([=] { on_host(to).copy_(on_host(from)); });
  if (to.is_cpu()) {
    guard.synchronizeStream(stream);
  }
  return to;
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat>) {
  auto memory = at::empty(sizes, at::dtype(type.value_or(at::kFloat)));
  at::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(),
                      at::DataPtr(memory.data_ptr(), new at::Tensor(memory), [](void* kept) {
                        delete static_cast<at::Tensor*>(kept);
                      }, *device));
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), memory.dtype());
  made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return made;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("empty.memory_format", empty);
  library.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                                std::optional<int64_t>) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(self.storage()), self.key_set(), self.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return made;
  });
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::register_privateuse1_backend("emulated");
  module.def("tensor", [](const at::Tensor& memory, c10::DeviceIndex index) {
    at::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(),
                        at::DataPtr(memory.data_ptr(), c10::Device(Guard::kind, index)));
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), memory.dtype());
    made.unsafeGetTensorImpl()->set_sizes_contiguous(memory.sizes());
    return made;
  }, "A tensor on the device in the memory of one of the processor's");
  module.def("copies", [] { return copies.load(); }, "How many there were between the device and the host");
  module.def("use_stream", [](c10::DeviceIndex index, c10::StreamId id) { streams[index] = id; });
  module.def("fill", [](at::Tensor memory, double value, c10::DeviceIndex index) {
    queues[{index, streams[index]}].push_back([=] { memory.fill_(value); });
  }, "Queue it in the current stream");
}
