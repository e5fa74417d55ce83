// SPDX-License-Identifier: GPL-2.0-only
// all_reduce in a loop without Python: by MPI alone, and by a process group of torch.distributed. See mpi_backend.py.
#include <mpi.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>

namespace {

template <typename Function>
double seconds(int repeat, const Function& function) {
  const auto start = std::chrono::steady_clock::now();
  for (int number = 0; number < repeat; ++number) {
    function();
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeat;
}

double plain(const at::Tensor& tensor, int repeat) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == at::kFloat, "floats in one piece are needed");
  return seconds(repeat, [&] {
    MPI_Allreduce(MPI_IN_PLACE, tensor.data_ptr(), static_cast<int>(tensor.numel()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  });
}

double started(const at::Tensor& tensor, int repeat) {
  return seconds(repeat, [&] {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, tensor.data_ptr(), static_cast<int>(tensor.numel()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                   &request);
    for (int complete = 0; !complete;) {
      MPI_Test(&request, &complete, MPI_STATUS_IGNORE);
    }
  });
}

double group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const at::Tensor& tensor, int repeat) {
  c10d::AllreduceOptions options;
#if BENCHMARK_TORCH >= 208
  options.asyncOp = false;
#endif
  std::vector<at::Tensor> tensors{tensor};
  return seconds(repeat, [&] { group->allreduce(tensors, options)->wait(); });
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using released = py::call_guard<py::gil_scoped_release>;
  module.def("plain", &plain, released());
  module.def("started", &started, released());
  module.def("group", &group, released());
}
