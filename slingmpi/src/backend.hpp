// SPDX-License-Identifier: GPL-2.0-only
// torch.distributed's backend "slingmpi": a process group whose operations are MPI's.
#pragma once

#include "engine.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <unordered_set>

namespace slingmpi {

class MPIBackend : public c10d::Backend {
 public:
  // ranks: ranks of MPI_COMM_WORLD, in the order of the group. All of them must come here.
  MPIBackend(const std::vector<int64_t>& ranks, std::chrono::milliseconds timeout, std::string name);
  ~MPIBackend() override;

  const std::string getBackendName() const override { return "slingmpi"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // virtual in newer releases of PyTorch alone
  void abort();
  void shutdown();

 private:
  class Call;

  // gather and scatter: one tensor of each rank, and a list with one for each on the root alone.
  WorkPtr with_root(
      bool gathers, Tensors& mine, TensorLists& lists, int64_t root, std::chrono::milliseconds timeout, bool waits);

  std::chrono::milliseconds timeout_;
  const bool compares_;    // TORCH_DISTRIBUTED_DEBUG=DETAIL
  std::shared_ptr<Communicator> communicator_;
  uint64_t sequence_ = 0;
  std::unordered_set<size_t> agreed_;    // what all ranks have been found to do alike
};

} // namespace slingmpi
