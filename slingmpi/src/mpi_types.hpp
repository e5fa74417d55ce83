// SPDX-License-Identifier: GPL-2.0-only
// PyTorch's data types, reductions and sizes in terms of MPI.
#pragma once

#include <ATen/ATen.h>
#include <mpi.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>

namespace slingmpi {

// Throws torch.distributed.DistBackendError with MPI's own text if `status` is an error of the call.
void check(int status, const char* call);

// Elements or bytes that one call of MPI gets: its counts are int. Larger ones are split.
extern int64_t largest_count;

// How elements are reduced: MPI's types and operations, or own ones for what MPI has none of.
struct Reduction {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
  bool own = false;       // the operation is a function of ours, which runs on the host
};

// Throws an error that names data type and operation where there is no such reduction.
Reduction reduction_of(at::ScalarType type, const c10d::ReduceOp& op);

std::string name_of(const c10d::ReduceOp& op);

// A number of bytes as one MPI count and type, also above 2^31.
class Bytes {
 public:
  explicit Bytes(int64_t bytes);
  ~Bytes();
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  int count = 0;
  MPI_Datatype type = MPI_BYTE;
};

// Whether this MPI takes pointers to memory of this machine's GPUs. Its own answer where it has a query function,
// Cray MPICH's setting and GTL library where not.
bool takes_gpu_memory();

// The first line of what MPI says of itself.
std::string library_version();

// Gives back the types and operations that reduction_of() made, before MPI is finalized.
void free_types();

} // namespace slingmpi
