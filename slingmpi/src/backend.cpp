// SPDX-License-Identifier: GPL-2.0-only
#include "backend.hpp"

#include "mpi_types.hpp"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

namespace slingmpi {

using c10d::OpType;
using c10d::ReduceOp;

namespace {

bool is_set(const char* name, const char* value) {
  const char* found = std::getenv(name);
  return found != nullptr && std::strcmp(found, value) == 0;
}

int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

// MPI may not be given a null pointer, even for nothing.
void* memory_of(const at::Tensor& tensor) {
  static char nothing[16];
  return tensor.numel() == 0 ? nothing : tensor.data_ptr();
}

// FSDP gathers into the buffer that its shard is in; MPI forbids that two arguments share memory.
bool share_memory(const at::Tensor& left, const at::Tensor& right) {
  const auto* one = static_cast<const char*>(memory_of(left));
  const auto* other = static_cast<const char*>(memory_of(right));
  return one < other + bytes_of(right) && other < one + bytes_of(left);
}

// Calls `function(offset, count)` for parts that MPI's int can count.
template <typename Function>
void in_parts(int64_t count, const Function& function) {
  for (int64_t offset = 0; offset == 0 || offset < count; offset += largest_count) {
    function(offset, static_cast<int>(std::min(largest_count, count - offset)));
  }
}

template <typename Options>
bool somebody_waits(const Options& options) {
#if SLINGMPI_TORCH >= 208
  return !options.asyncOp;
#else
  return false;
#endif
}

} // namespace

// One operation while it is put together: what MPI gets of each tensor, and what comes back into it.
class MPIBackend::Call {
 public:
  Call(
      MPIBackend& group,
      OpType type,
      const char* name,
      const Tensors& inputs,
      const Tensors& outputs,
      std::chrono::milliseconds limit)
      : group_(group), type_(type), name_(name) {
    Engine::get().require_running();
    for (const auto* list : {&inputs, &outputs}) {
      for (const auto& tensor : *list) {
        look_at(tensor);
      }
    }
    operation = c10::make_intrusive<Operation>(
        group.communicator_, type, name, at::hasCallbacks() ? std::make_optional(inputs) : std::nullopt, outputs,
        limit > std::chrono::milliseconds(0) ? limit : group.timeout_);
  }

  // Memory with what the tensor has, for MPI to read.
  at::Tensor in(const at::Tensor& tensor) {
    return stages_copies(tensor) ? to_host(tensor) : tensor.contiguous();
  }

  // Our own reductions are functions on the host: tensors on GPUs come to it.
  void reduces(const Reduction& how) { staging_ |= how.own; }

  // Memory for MPI to write into; afterwards the tensor has it. `filled`: MPI reads it first.
  at::Tensor out(const at::Tensor& tensor, bool filled = false) {
    // MPI forbids that it writes to one place twice at once, as for a tensor that is twice in a list
    const bool twice = std::any_of(
        written_.begin(), written_.end(), [&](const at::Tensor& other) { return share_memory(other, tensor); });
    if (tensor.is_contiguous() && !stages_copies(tensor) && !twice) {
      written_.push_back(tensor);
      return tensor;
    }
    auto memory = scratch(tensor.sizes(), tensor);
    if (filled) {
      memory.copy_(tensor);
    }
    after([tensor, memory]() mutable { tensor.copy_(memory); });
    return memory;
  }

  // New memory of that size, which is kept until the end.
  at::Tensor scratch(at::IntArrayRef sizes, const at::Tensor& like) {
    auto options = like.options();
    if (stages_copies(like)) {
      options = options.device(at::kCPU).pinned_memory(true);
    }
    return at::empty(sizes, options, at::MemoryFormat::Contiguous);
  }

  void after(std::function<void()> function) {
    finishing_.insert(finishing_.begin(), std::move(function));
  }

  void stage(Operation::Stage function) {
    operation->stages.push_back(std::move(function));
  }

  // Ranks that do different things are an error before MPI makes wrong results of it. In the ring of the ranks each
  // tells the next what it does, and only the first time: one that knows it waits in it for one that does other things.
  // TORCH_DISTRIBUTED_DEBUG=DETAIL: each time.
  void alike(const Tensors& tensors, int root = -1, const ReduceOp& op = ReduceOp::UNUSED) {
    size_t key = c10::get_hash(static_cast<int>(type_), root, static_cast<int>(op.op_));
    for (const auto& tensor : tensors) {
      key = c10::hash_combine(key, c10::get_hash(static_cast<int>(tensor.scalar_type()), tensor.numel()));
    }
    if (group_.agreed_.size() > 10000) {
      group_.agreed_.clear();
    }
    const int rank = group_.rank_, size = group_.size_, tag = group_.communicator_->largest_tag - 1;
    if (size == 1 || (!group_.agreed_.insert(key).second && !group_.compares_)) {
      return;
    }
    auto own = std::make_shared<std::string>(
        c10::str(name_, op.op_ != ReduceOp::UNUSED ? " " + name_of(op) : "", root < 0 ? "" : c10::str(" root ", root)));
    for (const auto& tensor : tensors) {
      *own += c10::str(" ", c10::toString(tensor.scalar_type()), "[", tensor.numel(), "]");
    }
    if (own->size() >= 192) {
      own->replace(160, std::string::npos, c10::str("... ", key));
    }
    own->resize(192);
    auto other = std::make_shared<std::string>(*own);
    const int before = (rank + size - 1) % size, after = (rank + 1) % size;
    stage([=, comm = group_.communicator_->comm](Requests& requests) {
      check(MPI_Irecv(other->data(), 192, MPI_CHAR, before, tag, comm, &requests.emplace_back()), "MPI_Irecv");
      check(MPI_Isend(own->data(), 192, MPI_CHAR, after, tag, comm, &requests.emplace_back()), "MPI_Isend");
    });
    stage([=, name = group_.communicator_->name](Requests&) {
      TORCH_CHECK_WITH(
          DistBackendError, *own == *other, "ranks of ", name, " do different things. This one: ", own->c_str(),
          "; rank ", before, ": ", other->c_str());
    });
  }

  // The stage of MPI_Isend or MPI_Irecv, which other operations need not wait for.
  template <typename Function>
  void message(Function* function, const char* name, const at::Tensor& memory, int peer, int tag) {
    operation->ordered = false;
    const auto comm = group_.communicator_->comm;
    stage([=](Requests& requests) {
      const Bytes bytes(bytes_of(memory));
      check(function(memory_of(memory), bytes.count, bytes.type, peer, tag, comm, &requests.emplace_back()), name);
    });
  }

  // The stage of MPI_Iallgather or MPI_Ialltoall: so many bytes from each rank, or to each. `in_place`: `to` has ours.
  using Exchange = int(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm, MPI_Request*);
  void exchange(
      Exchange* function, const char* name, const at::Tensor& from, const at::Tensor& to, int64_t size,
      bool in_place = false) {
    const auto comm = group_.communicator_->comm;
    stage([=](Requests& requests) {
      const Bytes bytes(size);
      const void* sent = in_place ? MPI_IN_PLACE : memory_of(from);
      check(function(sent, bytes.count, bytes.type, memory_of(to), bytes.count, bytes.type, comm,
                     &requests.emplace_back()),
            name);
    });
  }

  // What this thread has given all GPUs that the process uses is done.
  void wait_for_gpus() {
    const auto type = at::getAccelerator();
    const c10::impl::VirtualGuardImpl gpus(type.value_or(c10::kCPU));
    for (c10::DeviceIndex number = 0; type && number < gpus.deviceCount(); ++number) {
      if (at::globalContext().getAcceleratorHooksInterface(type).hasPrimaryContext(number)) {
        gpus.synchronizeDevice(number);
      }
    }
  }

  WorkPtr go(bool waits) {
    // Safe by construction: what GPUs have been given up to here is done before MPI sees the memory, and wait() returns
    // when the results are there. So operations begin in the order of the program, whatever streams they come from, and
    // what is copied at the end goes over a stream of its own and not behind what the user's has been given since.
    if (stream_) {
      stream_->synchronize();
      operation->device = stream_->device();
    }
    if (!finishing_.empty()) {
      operation->finishing = [functions = std::move(finishing_), device = operation->device] {
        c10::OptionalStreamGuard guard;
        if (device) {
          guard.reset_stream(c10::impl::VirtualGuardImpl(device->type()).getStreamFromGlobalPool(*device));
        }
        for (const auto& function : functions) {
          function();
        }
        if (device) {
          guard.current_stream()->synchronize();
        }
      };
    }
    ++group_.sequence_;
    Engine::get().submit(operation, waits);
    return operation;
  }

  c10::intrusive_ptr<Operation> operation;

 private:
  void look_at(const at::Tensor& tensor) {
    TORCH_CHECK(
        !tensor.is_sparse(), name_, ": slingmpi takes dense tensors alone. Use tensor.to_dense(), or gloo");
    if (tensor.is_cpu()) {
      return;
    }
    const auto device = tensor.device();
    static const bool staging = is_set("SLINGMPI_HOST_STAGING", "1");
    static const bool takes = takes_gpu_memory();
    TORCH_CHECK(
        takes || staging, name_, ": the tensor is on ", device.str(), ", and this MPI does not take GPU memory: ",
        library_version(), ". Cray MPICH: export MPICH_GPU_SUPPORT_ENABLED=1, and load the module of the "
        "accelerator before the installation, so that the GTL library is linked. Any MPI: export "
        "SLINGMPI_HOST_STAGING=1, and copies go through the host's memory, which is slower");
    // Open MPI does not, in nonblocking collectives (FAQ, "Running CUDA-aware Open MPI"; 4.1.4 crashed on an H200)
#ifdef OPEN_MPI
    if (type_ != OpType::SEND && type_ != OpType::RECV && type_ != OpType::RECVANYSOURCE) {
      if (!staging) {
        TORCH_WARN_ONCE("slingmpi: Open MPI takes no GPU memory in nonblocking collectives: they go through the host's "
                        "memory, which is slower");
      }
      staging_ = true;
    }
#endif
    staging_ |= !takes;
    TORCH_CHECK(
        !stream_ || stream_->device() == device, name_, ": tensors on ", stream_->device().str(), " and ", device.str(),
        " in one operation. Give each an operation of its own");
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }

  bool stages_copies(const at::Tensor& tensor) const { return staging_ && !tensor.is_cpu(); }

  static at::Tensor to_host(const at::Tensor& tensor) {
    auto memory = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
    return memory.copy_(tensor);
  }

  MPIBackend& group_;
  OpType type_;
  const char* name_;
  std::vector<std::function<void()>> finishing_;
  Tensors written_;
  std::optional<c10::Stream> stream_;
  bool staging_ = false;
};

namespace {

void need_same(const char* name, const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK_TYPE(
      left.scalar_type() == right.scalar_type(), name, ": input and output have different data types, ",
      c10::toString(left.scalar_type()), " and ", c10::toString(right.scalar_type()));
}

void need_numel(const char* name, const at::Tensor& tensor, int64_t numel) {
  TORCH_CHECK_VALUE(
      tensor.numel() == numel, name, ": a tensor of shape ", tensor.sizes(), " has ", tensor.numel(),
      " elements, where ", numel, " are needed");
}

void need_one(const char* name, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, name, ": ", tensors.size(), " tensors in place of one");
}

void need_tag(const char* name, int tag, int largest) {
  TORCH_CHECK_VALUE(tag >= 0 && tag < largest, name, ": tag ", tag, " is not from 0 to ", largest - 1);
}

void need_lists(const char* name, size_t lists, size_t tensors, const std::vector<at::Tensor>* list, int size) {
  TORCH_CHECK_VALUE(
      lists == 1 && tensors == 1 && static_cast<int>(list->size()) == size, name, ": needs one tensor here and a list "
      "with one for each of the ", size, " ranks there");
}

Reduction reduction(at::ScalarType type, const ReduceOp& op) {
  std::lock_guard<std::mutex> guard(Engine::get().mutex);    // it may have to make an operation of MPI
  return reduction_of(type, op);
}

// What a reduction does to one rank's tensor before and after MPI's sum.
void multiply_first(const ReduceOp& op, const at::Tensor& memory) {
  if (op.op_ != ReduceOp::PREMUL_SUM) {
    return;
  }
  const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (factor->tensor_factor.defined()) {
    memory.mul_(factor->tensor_factor.to(memory.device()));
  } else {
    memory.mul_(factor->double_factor);
  }
}

} // namespace

MPIBackend::MPIBackend(const std::vector<int64_t>& ranks, std::chrono::milliseconds timeout, std::string name)
    : Backend(
          static_cast<int>(std::find(ranks.begin(), ranks.end(), Engine::get().world_rank) - ranks.begin()),
          static_cast<int>(ranks.size())),
      timeout_(timeout),
      compares_(is_set("TORCH_DISTRIBUTED_DEBUG", "DETAIL")),
      communicator_(std::make_shared<Communicator>()) {
  auto& engine = Engine::get();
  engine.require_running();
  communicator_->rank = rank_;
  communicator_->size = size_;
  communicator_->name = c10::str("group ", name, " (rank ", rank_, " of ", size_, ")");
  std::vector<int> members(ranks.begin(), ranks.end());
  MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
  // it waits for the other members, and meanwhile other threads may have to make other groups
  std::unique_lock<std::mutex> lock(engine.mutex, std::defer_lock);
  if (engine.thread_level < MPI_THREAD_MULTIPLE) {
    lock.lock();
  }
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, size_, members.data(), &group), "MPI_Group_incl");
  const int tag = static_cast<int>(std::hash<std::string>()(name) % 32000);
  const int status = MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &communicator_->comm);
  MPI_Group_free(&world);
  MPI_Group_free(&group);
  check(status, "MPI_Comm_create_group");
  check(MPI_Comm_set_errhandler(communicator_->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int *largest = nullptr, found = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found), "MPI_Comm_get_attr");
  communicator_->largest_tag = *largest;
}

MPIBackend::~MPIBackend() {
  shutdown();
}

void MPIBackend::shutdown() {
  std::lock_guard<std::mutex> guard(Engine::get().mutex);
  if (communicator_->broken.empty()) {
    communicator_->broken = "the process group was destroyed";
  }
}

void MPIBackend::abort() {
  Engine::get().fail(*communicator_, "the process group was aborted by the program");
}

MPIBackend::WorkPtr MPIBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  need_one("broadcast", tensors);
  Call call(*this, OpType::BROADCAST, "mpi:broadcast", tensors, tensors, opts.timeout);
  const int root = static_cast<int>(opts.rootRank);
  call.alike(tensors, root);
  const auto memory = root == rank_ ? call.in(tensors[0]) : call.out(tensors[0]);
  const auto comm = communicator_->comm;
  // MPICH 4.0.2 ends its MPI_Ibcast of a type of more than 2^31 bytes with an error
  call.stage([=](Requests& requests) {
    in_parts(bytes_of(memory), [&](int64_t offset, int count) {
      auto* place = static_cast<char*>(memory_of(memory)) + offset;
      check(MPI_Ibcast(place, count, MPI_BYTE, root, comm, &requests.emplace_back()), "MPI_Ibcast");
    });
  });
  return call.go(somebody_waits(opts));
}

namespace {

// Adds what makes the same of the tensor on all ranks.
template <typename Call>
void add_allreduce(Call& call, const at::Tensor& tensor, const ReduceOp& op, MPI_Comm comm, int size) {
  const auto how = reduction(tensor.scalar_type(), op);
  call.reduces(how);
  const auto memory = call.out(tensor, /*filled=*/true);
  if (op.op_ == ReduceOp::AVG) {
    call.after([memory, size] { memory.div_(size); });
  }
  multiply_first(op, memory);
  call.stage([=](Requests& requests) {
    in_parts(memory.numel(), [&](int64_t offset, int count) {
      auto* place = static_cast<char*>(memory_of(memory)) + offset * memory.element_size();
      auto* request = &requests.emplace_back();
      check(MPI_Iallreduce(MPI_IN_PLACE, place, count, how.type, how.op, comm, request), "MPI_Iallreduce");
    });
  });
}

} // namespace

MPIBackend::WorkPtr MPIBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Call call(*this, OpType::ALLREDUCE, "mpi:all_reduce", tensors, tensors, opts.timeout);
  call.alike(tensors, -1, opts.reduceOp);
  for (const auto& tensor : tensors) {
    add_allreduce(call, tensor, opts.reduceOp, communicator_->comm, size_);
  }
  return call.go(somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return allreduce(tensors, opts);
}

MPIBackend::WorkPtr MPIBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  need_one("reduce", tensors);
  Call call(*this, OpType::REDUCE, "mpi:reduce", tensors, tensors, opts.timeout);
  const auto tensor = tensors[0];
  const auto comm = communicator_->comm;
  const int root = static_cast<int>(opts.rootRank);
  call.alike(tensors, root, opts.reduceOp);
  const auto how = reduction(tensor.scalar_type(), opts.reduceOp);
  call.reduces(how);
  auto memory = root == rank_ ? call.out(tensor, /*filled=*/true) : call.in(tensor);
  if (root == rank_ && opts.reduceOp.op_ == ReduceOp::AVG) {
    call.after([memory, size = size_] { memory.div_(size); });
  }
  if (root != rank_ && opts.reduceOp.op_ == ReduceOp::PREMUL_SUM) {
    memory = memory.clone();
  }
  multiply_first(opts.reduceOp, memory);
  call.stage([=, here = root == rank_](Requests& requests) {
    in_parts(memory.numel(), [&](int64_t offset, int count) {
      auto* place = static_cast<char*>(memory_of(memory)) + offset * memory.element_size();
      check(MPI_Ireduce(
                here ? MPI_IN_PLACE : place, here ? place : nullptr, count, how.type, how.op, root, comm,
                &requests.emplace_back()),
            "MPI_Ireduce");
    });
  });
  return call.go(somebody_waits(opts));
}

namespace {

template <typename Call>
void add_allgather(
    Call& call, const char* name, const at::Tensor& output, const at::Tensor& input, int rank, int size) {
  need_same(name, input, output);
  need_numel(name, output, input.numel() * size);
  auto from = call.in(input);
  const auto to = call.out(output);
  const bool in_place = memory_of(from) == static_cast<char*>(memory_of(to)) + rank * bytes_of(from);
  if (!in_place && share_memory(from, to)) {
    from = from.clone();
  }
  call.exchange(MPI_Iallgather, "MPI_Iallgather", from, to, bytes_of(from), in_place);
}

// One tensor for each rank, as rows of one.
template <typename Call>
at::Tensor rows_for(Call& call, const char* name, const std::vector<at::Tensor>& list, const at::Tensor& like) {
  for (const auto& tensor : list) {
    need_same(name, tensor, like);
    need_numel(name, tensor, like.numel());
  }
  return call.scratch({static_cast<int64_t>(list.size()), like.numel()}, like);
}

template <typename Call>
at::Tensor rows_into(Call& call, const char* name, const std::vector<at::Tensor>& list, const at::Tensor& like) {
  auto rows = rows_for(call, name, list, like);
  call.after([rows, list] {
    for (size_t rank = 0; rank < list.size(); ++rank) {
      list[rank].copy_(rows[static_cast<int64_t>(rank)].view(list[rank].sizes()));
    }
  });
  return rows;
}

template <typename Call>
at::Tensor rows_of(Call& call, const char* name, const std::vector<at::Tensor>& list, const at::Tensor& like) {
  auto rows = rows_for(call, name, list, like);
  for (size_t rank = 0; rank < list.size(); ++rank) {
    rows[static_cast<int64_t>(rank)].copy_(list[rank].reshape({-1}));
  }
  return rows;
}

template <typename Call>
void add_allgather_lists(Call& call, const std::vector<at::Tensor>& outputs, const at::Tensor& input) {
  const auto rows = rows_into(call, "all_gather", outputs, input);
  const auto from = call.in(input);
  call.exchange(MPI_Iallgather, "MPI_Iallgather", from, rows, bytes_of(from));
}

} // namespace

MPIBackend::WorkPtr MPIBackend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  need_lists("all_gather", outputs.size(), inputs.size(), outputs.data(), size_);
  Call call(*this, OpType::ALLGATHER, "mpi:all_gather", inputs, outputs[0], opts.timeout);
  call.alike(inputs);
  add_allgather_lists(call, outputs[0], inputs[0]);
  return call.go(somebody_waits(opts));
}

// outputs[rank][number], as PyTorch has it for this one alone
MPIBackend::WorkPtr MPIBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Tensors all;
  for (const auto& list : outputs) {
    TORCH_CHECK_VALUE(
        list.size() == inputs.size(), "all_gather_coalesced: ", inputs.size(), " tensors, but a list of ", list.size(),
        " for the results of a rank");
    all.insert(all.end(), list.begin(), list.end());
  }
  Call call(*this, OpType::ALLGATHER, "mpi:all_gather", inputs, all, opts.timeout);
  call.alike(inputs);
  for (size_t number = 0; number < inputs.size(); ++number) {
    Tensors list;
    for (const auto& of_rank : outputs) {
      list.push_back(of_rank[number]);
    }
    need_lists("all_gather_coalesced", 1, 1, &list, size_);
    add_allgather_lists(call, list, inputs[number]);
  }
  return call.go(somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Call call(*this, OpType::_ALLGATHER_BASE, "mpi:all_gather_into_tensor", {input}, {output}, opts.timeout);
  call.alike({input});
  add_allgather(call, "all_gather_into_tensor", output, input, rank_, size_);
  return call.go(somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Call call(*this, OpType::COALESCED, "mpi:all_gather_into_tensor_coalesced", inputs, outputs, opts.timeout);
  call.alike(inputs);
  for (size_t number = 0; number < inputs.size(); ++number) {
    add_allgather(call, "all_gather_into_tensor", outputs[number], inputs[number], rank_, size_);
  }
  return call.go(somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::with_root(
    bool gathers, Tensors& mine, TensorLists& lists, int64_t root_rank, std::chrono::milliseconds timeout, bool waits) {
  const char* name = gathers ? "gather" : "scatter";
  const int root = static_cast<int>(root_rank);
  const bool here = root == rank_;
  need_one(name, mine);
  if (here) {
    need_lists(name, lists.size(), mine.size(), lists.data(), size_);
  } else {
    TORCH_CHECK_VALUE(lists.empty() || lists[0].empty(), name, ": rank ", rank_, " is not the one that has a list, ",
                      root, ", but gave one");
  }
  Call call(*this, gathers ? OpType::GATHER : OpType::SCATTER, gathers ? "mpi:gather" : "mpi:scatter", mine,
            !gathers ? mine : here ? lists[0] : Tensors(), timeout);
  call.alike(mine, root);
  const auto memory = gathers ? call.in(mine[0]) : call.out(mine[0]);
  const auto rows = !here ? memory
      : gathers ? rows_into(call, name, lists[0], mine[0])
                : rows_of(call, name, lists[0], mine[0]);
  const auto comm = communicator_->comm;
  call.stage([=](Requests& requests) {
    const Bytes bytes(bytes_of(memory));
    auto* one = memory_of(memory);
    auto* all = here ? memory_of(rows) : nullptr;
    auto* request = &requests.emplace_back();
    check(gathers ? MPI_Igather(one, bytes.count, bytes.type, all, bytes.count, bytes.type, root, comm, request)
                  : MPI_Iscatter(all, bytes.count, bytes.type, one, bytes.count, bytes.type, root, comm, request),
          gathers ? "MPI_Igather" : "MPI_Iscatter");
  });
  return call.go(waits);
}

MPIBackend::WorkPtr MPIBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  return with_root(true, inputs, outputs, opts.rootRank, opts.timeout, somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) {
  return with_root(false, outputs, inputs, opts.rootRank, opts.timeout, somebody_waits(opts));
}

namespace {

// `rows`: what this rank has for each rank, one row for each, in memory that is ours.
template <typename Call>
void add_reduce_scatter(
    Call& call, const at::Tensor& output, const at::Tensor& rows, const ReduceOp& op, MPI_Comm comm, int size) {
  const auto how = reduction(output.scalar_type(), op);
  const auto to = call.out(output);
  if (op.op_ == ReduceOp::AVG) {
    call.after([to, size] { to.div_(size); });
  }
  multiply_first(op, rows);
  const int64_t numel = to.numel();
  TORCH_CHECK_VALUE(numel <= largest_count, "reduce_scatter: ", numel, " elements for each rank are more than one call "
                    "of MPI takes. Share them out over several");
  call.stage([=](Requests& requests) {
    check(MPI_Ireduce_scatter_block(
              memory_of(rows), memory_of(to), static_cast<int>(numel), how.type, how.op, comm,
              &requests.emplace_back()),
          "MPI_Ireduce_scatter_block");
  });
}

template <typename Call>
at::Tensor own_copy(Call& call, const at::Tensor& input, const at::Tensor& output, const ReduceOp& op) {
  auto memory = call.in(input);
  const bool changes = op.op_ == ReduceOp::PREMUL_SUM && memory.is_same(input);
  return changes || share_memory(memory, output) ? memory.clone() : memory;
}

} // namespace

MPIBackend::WorkPtr MPIBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  need_lists("reduce_scatter", inputs.size(), outputs.size(), inputs.data(), size_);
  Call call(*this, OpType::REDUCE_SCATTER, "mpi:reduce_scatter", inputs[0], outputs, opts.timeout);
  call.alike(outputs, -1, opts.reduceOp);
  call.reduces(reduction(outputs[0].scalar_type(), opts.reduceOp));
  const auto rows = rows_of(call, "reduce_scatter", inputs[0], outputs[0]);
  add_reduce_scatter(call, outputs[0], rows, opts.reduceOp, communicator_->comm, size_);
  return call.go(somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

MPIBackend::WorkPtr MPIBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  Call call(*this, OpType::_REDUCE_SCATTER_BASE, "mpi:reduce_scatter_tensor", inputs, outputs, opts.timeout);
  call.alike(outputs, -1, opts.reduceOp);
  for (size_t number = 0; number < inputs.size(); ++number) {
    need_same("reduce_scatter_tensor", inputs[number], outputs[number]);
    need_numel("reduce_scatter_tensor", inputs[number], outputs[number].numel() * size_);
    call.reduces(reduction(outputs[number].scalar_type(), opts.reduceOp));
    const auto rows = own_copy(call, inputs[number], outputs[number], opts.reduceOp);
    add_reduce_scatter(call, outputs[number], rows, opts.reduceOp, communicator_->comm, size_);
  }
  return call.go(somebody_waits(opts));
}

namespace {

// Elements that go to or come from each rank, as slices of the first dimension.
std::vector<int64_t> shares(const char* name, const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  const int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row = length == 0 ? 0 : tensor.numel() / length;
  std::vector<int64_t> elements(splits.begin(), splits.end());
  if (splits.empty()) {
    TORCH_CHECK_VALUE(length % size == 0, name, ": ", length, " rows cannot be shared out over ", size,
                      " ranks: give split sizes");
    elements.assign(static_cast<size_t>(size), length / size);
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(elements.size()) == size &&
          std::accumulate(elements.begin(), elements.end(), int64_t(0)) == length,
      name, ": split sizes ", elements, " are not one for each of ", size, " ranks with ", length, " rows in all");
  for (auto& count : elements) {
    count *= row;
  }
  return elements;
}

// From each rank to each: messages, which may be as large as they are. The two largest tags are not a user's.
template <typename Call>
void add_exchange(Call& call, std::vector<at::Tensor> from, std::vector<at::Tensor> to, const Communicator& group) {
  const auto comm = group.comm;
  const int rank = group.rank, size = group.size, tag = group.largest_tag;
  const auto own = static_cast<size_t>(rank);
  TORCH_CHECK_VALUE(
      bytes_of(from[own]) == bytes_of(to[own]), "all_to_all: this rank sends itself ", bytes_of(from[own]),
      " bytes, but has ", bytes_of(to[own]), " for them in the output. Give both the same number of elements");
  for (int step = 0; step < size; ++step) {
    call.operation->expected.push_back(bytes_of(to[static_cast<size_t>((rank + size - step) % size)]));
  }
  call.stage([=](Requests& requests) {
    requests.reserve(static_cast<size_t>(size) * 2);
    for (int step = 0; step < size; ++step) {
      const int source = (rank + size - step) % size;
      const auto& memory = to[static_cast<size_t>(source)];
      const Bytes bytes(bytes_of(memory));
      auto* request = &requests.emplace_back();
      check(MPI_Irecv(memory_of(memory), bytes.count, bytes.type, source, tag, comm, request), "MPI_Irecv");
    }
    for (int step = 0; step < size; ++step) {
      const int target = (rank + step) % size;
      const auto& memory = from[static_cast<size_t>(target)];
      const Bytes bytes(bytes_of(memory));
      auto* request = &requests.emplace_back();
      check(MPI_Isend(memory_of(memory), bytes.count, bytes.type, target, tag, comm, request), "MPI_Isend");
    }
  });
}

} // namespace

MPIBackend::WorkPtr MPIBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& opts) {
  const char* name = "all_to_all_single";
  need_same(name, input, output);
  Call call(*this, OpType::ALLTOALL_BASE, "mpi:all_to_all_single", {input}, {output}, opts.timeout);
  call.alike({});
  const auto sent = shares(name, input, input_splits, size_), received = shares(name, output, output_splits, size_);
  const auto to = call.out(output);
  auto from = call.in(input);
  if (share_memory(from, to)) {
    from = from.clone();
  }
  // messages even for equal shares: another rank may have given the same ones as split sizes
  const auto parts = [](const at::Tensor& memory, const std::vector<int64_t>& counts) {
    return memory.reshape({-1}).split_with_sizes(counts);
  };
  add_exchange(call, parts(from, sent), parts(to, received), *communicator_);
  return call.go(somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  need_lists("all_to_all", 1, 1, &inputs, size_);
  need_lists("all_to_all", 1, 1, &outputs, size_);
  Call call(*this, OpType::ALLTOALL, "mpi:all_to_all", inputs, outputs, opts.timeout);
  call.alike({});
  Tensors from, to;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    need_same("all_to_all", inputs[rank], inputs[0]);
    need_same("all_to_all", outputs[rank], inputs[0]);
    from.push_back(call.in(inputs[rank]));
    to.push_back(call.out(outputs[rank]));
    if (share_memory(from.back(), outputs[rank])) {
      from.back() = from.back().clone();
    }
  }
  add_exchange(call, from, to, *communicator_);
  return call.go(somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::barrier(const c10d::BarrierOptions& opts) {
  Call call(*this, OpType::BARRIER, "mpi:barrier", {}, {}, opts.timeout);
  call.wait_for_gpus();
  call.alike({});
  const auto comm = communicator_->comm;
  call.stage([comm](Requests& requests) {
    check(MPI_Ibarrier(comm, &requests.emplace_back()), "MPI_Ibarrier");
  });
  return call.go(somebody_waits(opts));
}

MPIBackend::WorkPtr MPIBackend::send(Tensors& tensors, int destination, int tag) {
  need_one("send", tensors);
  need_tag("send", tag, communicator_->largest_tag - 1);
  Call call(*this, OpType::SEND, "mpi:send", tensors, {}, c10d::kUnsetTimeout);
  call.message(MPI_Isend, "MPI_Isend", call.in(tensors[0]), destination, tag);
  return call.go(false);
}

MPIBackend::WorkPtr MPIBackend::recv(Tensors& tensors, int source, int tag) {
  need_one("recv", tensors);
  need_tag("recv", tag, communicator_->largest_tag - 1);
  const bool any = source == MPI_ANY_SOURCE;
  Call call(*this, any ? OpType::RECVANYSOURCE : OpType::RECV, any ? "mpi:recvAnySource" : "mpi:recv", tensors, tensors,
            c10d::kUnsetTimeout);
  const auto memory = call.out(tensors[0]);
  call.operation->expected.push_back(bytes_of(memory));
  call.message(MPI_Irecv, "MPI_Irecv", memory, source, tag);
  return call.go(false);
}

MPIBackend::WorkPtr MPIBackend::recvAnysource(Tensors& tensors, int tag) {
  return recv(tensors, MPI_ANY_SOURCE, tag);
}

} // namespace slingmpi
