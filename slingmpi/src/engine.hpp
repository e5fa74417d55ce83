// SPDX-License-Identifier: GPL-2.0-only
// Operations in flight: who starts them, who asks MPI whether they are complete, and what happens when they are late.
//
// MPI moves data while somebody calls it. A thread that waits for its operation calls it itself, so that a small
// operation costs no change of threads; while nobody waits, the progress thread does. One lock is around all calls,
// so MPI_THREAD_SERIALIZED is enough where nobody else calls MPI; MPI_THREAD_MULTIPLE is asked for, and required of an
// MPI that somebody else started, who calls it beside us.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>
#include <mpi.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace slingmpi {

class Operation;
using OperationPtr = c10::intrusive_ptr<Operation>;
using Clock = std::chrono::steady_clock;
using Requests = c10::SmallVector<MPI_Request, 1>;    // one is the rule, and needs no memory

// The ranks of one process group. Its operations hold it: MPI's communicator is freed after the last of them.
struct Communicator {
  ~Communicator();

  MPI_Comm comm = MPI_COMM_NULL;
  int rank, size, largest_tag;
  std::string name;                   // for messages: group 0 (rank 1 of 4)
  std::deque<OperationPtr> waiting;   // collectives whose last stage has not begun, in the order of the program
  std::string broken;                 // why nothing can be started any more
};

class Operation : public c10d::Work {
 public:
  // Starts MPI requests. A collective of several stages keeps later ones waiting, so that all ranks start in one order.
  using Stage = std::function<void(Requests&)>;

  // `profiled`: the inputs where a profiler asks for them, which costs more than a small operation
  Operation(
      std::shared_ptr<Communicator> communicator,
      c10d::OpType type,
      const char* title,
      const std::optional<std::vector<at::Tensor>>& profiled,
      std::vector<at::Tensor> outputs,
      std::chrono::milliseconds limit)
      : Work(communicator->rank, type, profiled ? title : nullptr, profiled),
        communicator_(std::move(communicator)),
        title_(title),
        outputs_(std::move(outputs)),
        limit_(limit) {}

  c10::SmallVector<Stage, 1> stages;                  // they hold the memory that MPI is given
  std::function<void()> finishing;                    // when MPI has done its part: copies and divisions
  std::optional<c10::Device> device;                        // of the tensors; none for the processor
  c10::SmallVector<int64_t, 1> expected;              // bytes that the last stage's first requests must receive
  bool ordered = true;                                // a collective, not a message

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  friend class Engine;

  bool start();    // the next stage, if it may; whether something began
  bool test();     // whether MPI is through with the stage that has begun
  void check_received(size_t number, int status, MPI_Status& received);
  void complete(std::exception_ptr error);
  void settle(const c10::intrusive_ptr<c10::ivalue::Future>& future);

  std::shared_ptr<Communicator> communicator_;
  const char* title_;
  std::vector<at::Tensor> outputs_;
  Clock::time_point deadline_;    // from when it was not complete at once: reading a clock costs more than to be so
  std::chrono::milliseconds limit_;
  size_t next_stage_ = 0;
  Requests requests_;
  int source_ = -1;
  std::atomic<bool> done_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Engine {
 public:
  static Engine& get();

  // Starts MPI unless it runs already (mpi4py), and the progress thread.
  void start();
  void submit(const OperationPtr& operation, bool somebody_waits);
  // Asks MPI about all operations once; returns whether another thread was not doing it just then.
  bool progress();
  // All operations of the communicator end with this error, and no other can start.
  void fail(Communicator& communicator, const std::string& why);
  // At the end of Python: no thread of ours calls it any more.
  void stop();
  // At the end of the process, which knows its status: others may wait for a rank that failed.
  void leave(int status);
  // Throws unless MPI can be called.
  void require_running() const;

  std::mutex mutex;    // around MPI, the operations and the communicators
  int world_rank, world_size, thread_level;    // known once MPI runs

  struct Waiter {
    Waiter();
    ~Waiter();
  };

 private:
  void run();

  std::vector<OperationPtr> active_;
  std::vector<OperationPtr> abandoned_;    // MPI may still write into their memory
  std::vector<std::pair<OperationPtr, std::exception_ptr>> failed_;
  std::condition_variable wake_;
  std::atomic<int> waiters_{0};
  std::atomic<bool> pending_{false};
  std::atomic<uint64_t> submitted_{0};
  std::atomic<bool> stopping_{false};
  bool started_here_ = false;
  bool started_ = false;
  bool broken_ = false;
  std::atomic<bool> forked_{false};
  std::unique_ptr<std::thread> thread_;
};

} // namespace slingmpi
