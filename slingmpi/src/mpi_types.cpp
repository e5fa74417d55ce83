// SPDX-License-Identifier: GPL-2.0-only
#include "mpi_types.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>

namespace slingmpi {

using c10d::ReduceOp;

int64_t largest_count = int64_t(1) << 30;

void check(int status, const char* call) {
  if (status == MPI_SUCCESS) {
    return;
  }
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  TORCH_CHECK_WITH(DistBackendError, false, call, " failed: ", std::string(text, length));
}

namespace {

// A minimum or maximum with a NaN is NaN, on all ranks: MPI's own depends on the order (MPICH).
struct Sum {
  template <typename T> static T of(T left, T right) { return left + right; }
};
struct Product {
  template <typename T> static T of(T left, T right) { return left * right; }
};
struct Minimum {
  template <typename T> static T of(T left, T right) { return right < left || right != right ? right : left; }
};
struct Maximum {
  template <typename T> static T of(T left, T right) { return right > left || right != right ? right : left; }
};

// An operation of MPI_Op_create. Each step is rounded to the 16 bits of a short number, as gloo does it.
template <typename Number, typename Operation>
void combine(void* in, void* inout, int* count, MPI_Datatype*) {
  const auto* from = static_cast<const Number*>(in);
  auto* to = static_cast<Number*>(inout);
  for (int i = 0; i < *count; ++i) {
    using Wide = std::conditional_t<sizeof(Number) == 2, float, Number>;
    to[i] = static_cast<Number>(Operation::of(static_cast<Wide>(from[i]), static_cast<Wide>(to[i])));
  }
}

// Made when first needed, under Engine's lock as every call of MPI.
MPI_Datatype two_bytes_type = MPI_DATATYPE_NULL;
std::map<std::pair<at::ScalarType, ReduceOp::RedOpType>, MPI_Op> own_ops;

MPI_Datatype two_bytes() {
  if (two_bytes_type == MPI_DATATYPE_NULL) {
    check(MPI_Type_contiguous(2, MPI_BYTE, &two_bytes_type), "MPI_Type_contiguous");
    check(MPI_Type_commit(&two_bytes_type), "MPI_Type_commit");
  }
  return two_bytes_type;
}

template <typename Number>
MPI_User_function* own_function(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM: return combine<Number, Sum>;
    case ReduceOp::PRODUCT: return combine<Number, Product>;
    case ReduceOp::MIN: return combine<Number, Minimum>;
    case ReduceOp::MAX: return combine<Number, Maximum>;
    default: return nullptr;
  }
}

MPI_Op own_op(at::ScalarType type, ReduceOp::RedOpType op) {
  auto* function = type == at::kBFloat16 ? own_function<c10::BFloat16>(op)
      : type == at::kHalf                ? own_function<c10::Half>(op)
      : type == at::kFloat               ? own_function<float>(op)
                                         : own_function<double>(op);
  if (function == nullptr) {
    return MPI_OP_NULL;
  }
  const auto found = own_ops.emplace(std::make_pair(type, op), MPI_OP_NULL).first;
  if (found->second == MPI_OP_NULL) {
    check(MPI_Op_create(function, /*commute=*/1, &found->second), "MPI_Op_create");
  }
  return found->second;
}

MPI_Datatype number_type(at::ScalarType type) {
  switch (type) {
    case at::kByte: return MPI_UINT8_T;
    case at::kChar: return MPI_INT8_T;
    case at::kShort: return MPI_INT16_T;
    case at::kInt: return MPI_INT32_T;
    case at::kLong: return MPI_INT64_T;
    case at::kFloat: return MPI_FLOAT;
    case at::kDouble: return MPI_DOUBLE;
    case at::kComplexFloat: return MPI_C_FLOAT_COMPLEX;
    case at::kComplexDouble: return MPI_C_DOUBLE_COMPLEX;
    default: return MPI_DATATYPE_NULL;
  }
}

MPI_Op number_op(at::ScalarType type, ReduceOp::RedOpType op) {
  const bool whole = at::isIntegralType(type, /*includeBool=*/true);
  switch (op) {
    case ReduceOp::SUM: return MPI_SUM;
    case ReduceOp::PRODUCT: return MPI_PROD;
    case ReduceOp::MIN: return at::isComplexType(type) ? MPI_OP_NULL : MPI_MIN;
    case ReduceOp::MAX: return at::isComplexType(type) ? MPI_OP_NULL : MPI_MAX;
    case ReduceOp::BAND: return whole ? MPI_BAND : MPI_OP_NULL;
    case ReduceOp::BOR: return whole ? MPI_BOR : MPI_OP_NULL;
    case ReduceOp::BXOR: return whole ? MPI_BXOR : MPI_OP_NULL;
    default: return MPI_OP_NULL;
  }
}

// Truth values stay 0 and 1: a sum says whether any is true, a product whether all are.
MPI_Op truth_op(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM:
    case ReduceOp::MAX:
    case ReduceOp::BOR: return MPI_MAX;
    case ReduceOp::PRODUCT:
    case ReduceOp::MIN:
    case ReduceOp::BAND: return MPI_MIN;
    case ReduceOp::BXOR: return MPI_BXOR;
    default: return MPI_OP_NULL;
  }
}

} // namespace

std::string name_of(const ReduceOp& op) {
  static const char* const names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  const auto number = static_cast<size_t>(op.op_);
  return number < std::size(names) ? names[number] : std::to_string(number);
}

Reduction reduction_of(at::ScalarType type, const ReduceOp& op) {
  Reduction found;
  auto wanted = op.op_;
  if (wanted == ReduceOp::AVG || wanted == ReduceOp::PREMUL_SUM) {
    const bool divides = at::isFloatingType(type) || at::isComplexType(type);
    wanted = divides ? ReduceOp::SUM : ReduceOp::UNUSED;
  }
  if (type == at::kHalf || type == at::kBFloat16) {
    found.type = two_bytes();
    found.op = own_op(type, wanted);
    found.own = true;
  } else if (type == at::kBool) {
    found.type = MPI_UINT8_T;
    found.op = truth_op(wanted);
  } else {
    found.type = number_type(type);
    found.own = at::isFloatingType(type) && (wanted == ReduceOp::MIN || wanted == ReduceOp::MAX) &&
        found.type != MPI_DATATYPE_NULL;
    found.op = found.own ? own_op(type, wanted) : number_op(type, wanted);
  }
  TORCH_CHECK_TYPE(
      found.type != MPI_DATATYPE_NULL && found.op != MPI_OP_NULL,
      "slingmpi has no reduction ", name_of(op), " for tensors of ", c10::toString(type),
      ". Convert the tensor, or use another operation");
  return found;
}

Bytes::Bytes(int64_t bytes) {
  if (bytes <= largest_count) {
    count = static_cast<int>(bytes);
    return;
  }
  MPI_Datatype block = MPI_DATATYPE_NULL, blocks = MPI_DATATYPE_NULL;
  const int64_t whole = bytes / largest_count;
  check(MPI_Type_contiguous(static_cast<int>(largest_count), MPI_BYTE, &block), "MPI_Type_contiguous");
  check(MPI_Type_contiguous(static_cast<int>(whole), block, &blocks), "MPI_Type_contiguous");
  int lengths[] = {1, static_cast<int>(bytes - whole * largest_count)};
  MPI_Aint places[] = {0, static_cast<MPI_Aint>(whole * largest_count)};
  MPI_Datatype types[] = {blocks, MPI_BYTE};
  check(MPI_Type_create_struct(2, lengths, places, types, &type), "MPI_Type_create_struct");
  check(MPI_Type_commit(&type), "MPI_Type_commit");
  MPI_Type_free(&block);
  MPI_Type_free(&blocks);
  count = 1;
}

// MPI keeps a type until the operations that use it are complete (MPI 4.1, 5.1.9).
Bytes::~Bytes() {
  if (type != MPI_BYTE) {
    MPI_Type_free(&type);
  }
}

void free_types() {
  for (auto& [key, op] : own_ops) {
    MPI_Op_free(&op);
  }
  own_ops.clear();
  if (two_bytes_type != MPI_DATATYPE_NULL) {
    MPI_Type_free(&two_bytes_type);
  }
}

std::string library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  // MPICH tells on further lines how it was configured
  const std::string version(text, length);
  return version.substr(0, version.find_first_of(std::string("\n\0", 2)));
}

namespace {

bool maps(const std::string& library) {
  std::ifstream lines("/proc/self/maps");
  for (std::string line; std::getline(lines, line);) {
    if (line.find(library) != std::string::npos) {
      return true;
    }
  }
  return false;
}

template <typename Function>
Function* function_of_mpi(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

} // namespace

bool takes_gpu_memory() {
  const bool rocm = maps("/libamdhip64.so");
  // Cray MPICH: intro_mpi(3), "GPU Support": this variable, and the GPU Transport Layer in the process
  const char* enabled = std::getenv("MPICH_GPU_SUPPORT_ENABLED");
  if (enabled != nullptr && std::string(enabled) == "1" && maps(rocm ? "/libmpi_gtl_hsa.so" : "/libmpi_gtl_cuda.so")) {
    return true;
  }
  // MPICH since 4.0: MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA or _HIP, &answer), 0 and 2 in its mpi.h
  if (auto* query = function_of_mpi<int(int, int*)>("MPIX_GPU_query_support")) {
    int answer = 0;
    return query(rocm ? 2 : 0, &answer) == MPI_SUCCESS && answer != 0;
  }
  // Open MPI: mpi-ext.h
  auto* query = function_of_mpi<int()>(rocm ? "MPIX_Query_rocm_support" : "MPIX_Query_cuda_support");
  return query != nullptr && query() == 1;
}

} // namespace slingmpi
