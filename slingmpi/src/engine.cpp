// SPDX-License-Identifier: GPL-2.0-only
#include "engine.hpp"

#include "mpi_types.hpp"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace slingmpi {

namespace {

template <typename... Words>
std::exception_ptr error_of(const Words&... words) {
  try {
    TORCH_CHECK_WITH(DistBackendError, false, words...);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

} // namespace

Communicator::~Communicator() {
  auto& engine = Engine::get();
  int finalized = 0;
  std::lock_guard<std::mutex> guard(engine.mutex);
  MPI_Finalized(&finalized);
  if (!finalized && comm != MPI_COMM_NULL) {
    MPI_Comm_free(&comm);
  }
}

bool Operation::start() {
  if (next_stage_ == stages.size() || !requests_.empty() || (ordered && communicator_->waiting.front().get() != this)) {
    return false;
  }
  const c10::OptionalDeviceGuard guard(device);
  do {
    stages[next_stage_++](requests_);
  } while (requests_.empty() && next_stage_ < stages.size());
  if (ordered && next_stage_ == stages.size()) {
    communicator_->waiting.pop_front();
  }
  return true;
}

bool Operation::test() {
  if (requests_.empty()) {
    return next_stage_ == stages.size();
  }
  const c10::OptionalDeviceGuard guard(device);
  int complete = 0;
  const int number = static_cast<int>(requests_.size());
  if (expected.empty() || next_stage_ < stages.size()) {
    check(number == 1 ? MPI_Test(requests_.data(), &complete, MPI_STATUS_IGNORE)
                      : MPI_Testall(number, requests_.data(), &complete, MPI_STATUSES_IGNORE),
          title_);
  } else {
    c10::SmallVector<MPI_Status, 1> statuses(requests_.size());
    const int result = MPI_Testall(number, requests_.data(), &complete, statuses.data());
    const bool wrong = result == MPI_ERR_IN_STATUS;
    for (size_t one = 0; one < expected.size() && (complete || wrong); ++one) {
      source_ = statuses[one].MPI_SOURCE;
      check_received(one, wrong ? statuses[one].MPI_ERROR : result, statuses[one]);
    }
    check(result, title_);
  }
  if (complete) {
    requests_.clear();
  }
  return complete && next_stage_ == stages.size();
}

void Operation::check_received(size_t number, int status, MPI_Status& received) {
  if (status == MPI_ERR_PENDING) {
    return;
  }
  int kind = MPI_SUCCESS;
  MPI_Count bytes = 0;
  MPI_Error_class(status, &kind);
  if (kind == MPI_SUCCESS) {
    check(MPI_Get_elements_x(&received, MPI_BYTE, &bytes), "MPI_Get_elements_x");
  }
  TORCH_CHECK_WITH(
      DistBackendError, kind != MPI_ERR_TRUNCATE && (kind != MPI_SUCCESS || bytes == expected[number]), title_, " in ",
      communicator_->name, ": rank ", received.MPI_SOURCE, " sent ", kind == MPI_SUCCESS ? c10::str(bytes) : "more",
      " bytes where the tensor to receive into has ", expected[number], ". Give both the same shape and data type");
}

void Operation::complete(std::exception_ptr error) {
  if (!error && finishing) {
    try {
      const c10::OptionalDeviceGuard guard(device);
      finishing();
    } catch (...) {
      error = std::current_exception();
    }
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    exception_ = error;
    done_ = true;
    future = future_;
  }
  cv_.notify_all();
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
  }
  if (!error) {
    stages.clear();
    finishing = nullptr;
  }
  if (future) {
    settle(future);
  }
}

void Operation::settle(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  if (exception_) {
    future->setError(exception_);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Operation::getFuture() {
  std::unique_lock<std::mutex> guard(mutex_);
  if (!future_) {
    std::vector<c10::Device> devices;
    for (const auto& tensor : outputs_) {
      if (!tensor.is_cpu() && std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
        devices.push_back(tensor.device());
      }
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    if (done_) {
      guard.unlock();
      settle(future_);
    }
  }
  return future_;
}

bool Operation::isCompleted() {
  if (!done_) {
    Engine::get().progress();
  }
  return done_;
}

bool Operation::isSuccess() const {
  return done_ && !exception_;
}

std::exception_ptr Operation::exception() const {
  return done_ ? exception_ : nullptr;
}

bool Operation::wait(std::chrono::milliseconds timeout) {
  if (!done_) {
    auto& engine = Engine::get();
    engine.require_running();
    Engine::Waiter waiter;
    const bool limited = timeout != kNoTimeout;
    const auto begin = Clock::now(), end = limited ? begin + timeout : Clock::time_point::max();
    // what takes longer than 10 ms and 100 MB/s waits for another rank, and leaves it the core
    int64_t bytes = 0;
    for (const auto& tensor : outputs_) {
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
    const auto patience = begin + std::chrono::milliseconds(10 + bytes / 100000);
    for (unsigned round = 1; !done_; ++round) {
      const auto now = round % 64 == 0 ? Clock::now() : Clock::time_point();
      TORCH_CHECK_WITH(
          DistBackendError, now < end, title_, " in ", communicator_->name, " is not complete after the ",
          timeout.count(), " ms that wait() was given");
      if (now > patience) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (!engine.progress() || round % 64 == 0) {
        sched_yield();
      }
    }
  }
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

Engine& Engine::get() {
  static auto* engine = new Engine;    // never destroyed: threads of Python may outlive static objects
  return *engine;
}

Engine::Waiter::Waiter() {
  ++Engine::get().waiters_;
}

Engine::Waiter::~Waiter() {
  auto& engine = Engine::get();
  if (--engine.waiters_ == 0 && engine.pending_) {
    engine.wake_.notify_one();
  }
}

void Engine::start() {
  std::lock_guard<std::mutex> guard(mutex);
  if (started_) {
    return;
  }
  int finalized = 0, initialized = 0;
  MPI_Finalized(&finalized);
  TORCH_CHECK(!finalized, "MPI was finalized already in this process, and cannot be started again. Create the process "
                          "group before whatever calls MPI_Finalize, or MPI.Finalize() of mpi4py");
  MPI_Initialized(&initialized);
  if (initialized) {
    MPI_Query_thread(&thread_level);
  } else {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &thread_level), "MPI_Init_thread");
    started_here_ = true;
    // errors of messages and of no communicator are theirs (MPI 4.1, 9.3): an exception, and not the job's end
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  }
  TORCH_CHECK(
      started_here_ || thread_level == MPI_THREAD_MULTIPLE, "MPI was started by another part of this program for "
      "fewer threads than call it now (thread level ", thread_level, "), and slingmpi needs MPI_THREAD_MULTIPLE. "
      "Whoever started it must ask for that; mpi4py: mpi4py.rc.thread_level = 'multiple'");
  TORCH_CHECK(
      thread_level >= MPI_THREAD_SERIALIZED, "this MPI has no support for threads (thread level ", thread_level,
      "), and slingmpi needs MPI_THREAD_SERIALIZED. Use another build of MPI: ", library_version());
  check(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &world_size), "MPI_Comm_size");
  pthread_atfork(nullptr, nullptr, [] { get().forked_ = true; });
  on_exit([](int status, void*) { get().leave(status); }, nullptr);    // glibc's: atexit() is not told the status
  thread_ = std::make_unique<std::thread>([this] { run(); });
  started_ = true;
}

void Engine::require_running() const {
  TORCH_CHECK(
      !forked_, "this process was forked from one that uses MPI, and MPI does not work in it. Start processes that "
                "communicate with multiprocessing's \"spawn\"; workers of a DataLoader must not");
  int finalized = 0;
  MPI_Finalized(&finalized);
  TORCH_CHECK(!finalized, "MPI was finalized while the process group is in use. Call destroy_process_group() before "
                          "MPI_Finalize, or MPI.Finalize() of mpi4py");
}

void Engine::submit(const OperationPtr& operation, bool somebody_waits) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto& communicator = *operation->communicator_;
    TORCH_CHECK_WITH(
        DistBackendError, communicator.broken.empty(), operation->title_, " in ", communicator.name,
        " cannot start: ", communicator.broken);
    if (operation->ordered) {
      communicator.waiting.push_back(operation);
    }
    active_.push_back(operation);
    pending_ = true;
    ++submitted_;
    try {
      operation->start();
    } catch (...) {
      active_.pop_back();
      communicator.waiting.clear();
      communicator.broken = "an earlier operation of it failed";
      broken_ = true;
      throw;
    }
  }
  if (!somebody_waits) {
    wake_.notify_one();
  }
}

bool Engine::progress() {
  c10::SmallVector<std::pair<OperationPtr, std::exception_ptr>, 1> ended;
  {
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (!lock.owns_lock()) {
      return false;
    }
    static unsigned rounds = 0;
    const bool look_at_clock = ++rounds % 64 == 0;
    const auto now = look_at_clock ? Clock::now() : Clock::time_point();
    auto keep = active_.begin();
    for (auto& operation : active_) {
      std::exception_ptr error;
      bool complete = false;
      try {
        complete = operation->test();
        while (!complete && operation->start()) {
          complete = operation->test();
        }
      } catch (...) {
        error = std::current_exception();
      }
      if (!complete && look_at_clock && operation->deadline_ == Clock::time_point()) {
        operation->deadline_ = now + operation->limit_;
      }
      if (!error && !complete && look_at_clock && now > operation->deadline_) {
        error = error_of(
            operation->title_, " in ", operation->communicator_->name, " is not complete after ",
            operation->limit_.count(), " ms, the timeout of it or of its group: at least one other rank did not come "
            "to it, came with another size, or is dead. Look for the first message of another rank");
      }
      if (error) {
        failed_.emplace_back(operation, error);
      }
      if (complete) {
        ended.emplace_back(std::move(operation), nullptr);
      } else if (!error) {
        if (&*keep != &operation) {
          *keep = std::move(operation);
        }
        ++keep;
      }
    }
    active_.erase(keep, active_.end());
    for (auto& failure : failed_) {
      // what MPI was asked for cannot be taken back
      broken_ = true;
      abandoned_.push_back(failure.first);
      auto& communicator = *failure.first->communicator_;
      if (communicator.broken.empty()) {
        communicator.broken = "an earlier operation of it failed";
      }
      const auto others = std::stable_partition(active_.begin(), active_.end(), [&](const OperationPtr& other) {
        return other->communicator_ != failure.first->communicator_;
      });
      for (auto other = others; other != active_.end(); ++other) {
        abandoned_.push_back(*other);
        ended.emplace_back(*other, failure.second);
      }
      active_.erase(others, active_.end());
      communicator.waiting.clear();
      ended.push_back(std::move(failure));
    }
    failed_.clear();
    pending_ = !active_.empty();
  }
  for (auto& [operation, error] : ended) {
    operation->complete(error);
  }
  return true;
}

void Engine::fail(Communicator& communicator, const std::string& why) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    communicator.broken = why;
    const auto found = std::find_if(active_.begin(), active_.end(), [&](const OperationPtr& operation) {
      return operation->communicator_.get() == &communicator;
    });
    if (found == active_.end()) {
      return;
    }
    failed_.emplace_back(*found, error_of((*found)->title_, " in ", communicator.name, " was given up: ", why));
    active_.erase(found);
  }
  while (!progress()) {
    sched_yield();
  }
}

void Engine::run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);    // short naps are short: 50 us more by default
  sigset_t signals;
  sigfillset(&signals);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);    // Python's handlers run in its main thread
  using namespace std::chrono_literals;
  uint64_t seen = 0;
  Clock::time_point eager_until;
  while (!stopping_) {
    if (!pending_ || waiters_ != 0) {
      std::unique_lock<std::mutex> lock(mutex);
      // with a limit: a notice may come between the test above and the wait
      wake_.wait_for(lock, 20ms, [this] { return stopping_ || (pending_ && waiters_ == 0); });
      continue;
    }
    progress();
    // a core that nobody else wants is asked for all of it while there is something new; a core on which the program
    // computes is left to it for a while
    const auto before = Clock::now();
    if (seen != submitted_) {
      seen = submitted_;
      eager_until = before + 50ms;
    }
    sched_yield();
    const auto after = Clock::now();
    if (after > eager_until || after - before > 20us) {
      std::this_thread::sleep_for(50us);
    }
  }
}

void Engine::stop() {
  if (thread_ && !forked_) {
    stopping_ = true;
    wake_.notify_all();
    thread_->join();
    thread_.reset();
    // before whoever started MPI finalizes it, which would wait for operations that nobody completes
    if (broken_) {
      leave(1);
    }
  }
}

void Engine::leave(int status) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (forked_ || finalized || (!started_here_ && !broken_)) {
    return;
  }
  if (status != 0 || broken_ || !active_.empty()) {
    // MPI_Finalize would wait for operations that nobody completes, and other ranks for this one
    std::fflush(nullptr);
    std::fprintf(stderr, "slingmpi: rank %d ends with %s: MPI_Abort ends the other ranks too\n", world_rank,
                 broken_ ? "a failed operation" : status != 0 ? "an error" : "operations that are not complete");
    MPI_Abort(MPI_COMM_WORLD, status != 0 ? status : 1);
  }
  free_types();
  MPI_Finalize();
}

} // namespace slingmpi
