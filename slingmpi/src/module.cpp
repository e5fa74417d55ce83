// SPDX-License-Identifier: GPL-2.0-only
#include "backend.hpp"
#include "mpi_types.hpp"

#include <torch/csrc/utils/pybind.h>

namespace slingmpi {

c10::intrusive_ptr<c10d::Backend> create(
    const std::vector<int64_t>& ranks, int64_t timeout_ms, const std::string& name) {
  return c10::make_intrusive<MPIBackend>(ranks, std::chrono::milliseconds(timeout_ms), name);
}

} // namespace slingmpi

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace slingmpi;
  using released = py::call_guard<py::gil_scoped_release>;
  module.def("start", [] {
    auto& engine = Engine::get();
    engine.start();
    return std::make_pair(engine.world_rank, engine.world_size);
  }, released(), "Start MPI unless it runs; (rank, size) of MPI_COMM_WORLD");
  module.def("create", &create, released(), py::arg("ranks"), py::arg("timeout_ms"), py::arg("name"));
  module.def("stop", [] { Engine::get().stop(); }, released());
  module.def("library_version", &library_version);
  module.def("takes_gpu_memory", &takes_gpu_memory);
  module.def("split_counts_above", [](int64_t count) { largest_count = count; },
             "For tests: elements and bytes that one call of MPI gets at most");
}
