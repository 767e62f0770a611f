#include "simt.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef __x86_64__
// Saves the registers that a function must keep, then goes on where `next` was saved.
extern "C" void zcomm_simt_switch(void** saved, void* next);
asm(R"(
.text
.globl zcomm_simt_switch
.hidden zcomm_simt_switch
.type zcomm_simt_switch, @function
zcomm_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size zcomm_simt_switch, .-zcomm_simt_switch
)");
#else
#include <ucontext.h>
#endif

namespace simt {
namespace {

constexpr std::size_t kStackBytes = std::size_t{128} << 10;

[[noreturn]] void die(const char* message) {
  std::fprintf(stderr, "kernel on the host: CTA %u, thread %u: %s\n", blockIdx.x, threadIdx.x, message);
  std::abort();
}

// A place where execution can stop and go on later. ThreadSanitizer is not told: to it the threads of a kernel are the
// one thread that runs them, one at a time. As fibers of their own they would be just as ordered, and its clocks would
// have some thousand places, which made tests take ten times as long. Calls in its reports may be those of other CUDA
// threads.
class Context {
 public:
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Begins in main() when it is first switched to.
  void make(void (*main)()) {
    stack_.reset(new std::byte[kStackBytes]);
    bottom_ = stack_.get();
    size_ = kStackBytes;
#ifdef __x86_64__
    const auto end = reinterpret_cast<std::uintptr_t>(stack_.get() + kStackBytes) / 16 * 16;
    void** top = reinterpret_cast<void**>(end);
    top[-1] = nullptr;  // where main() would return to
    top[-2] = reinterpret_cast<void*>(main);
    for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
    saved_ = top - 8;
#else
    getcontext(&saved_);
    saved_.uc_stack = {stack_.get(), 0, kStackBytes};
    makecontext(&saved_, main, 0);
#endif
  }

  void switch_to(Context& next) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&fake_stack_, next.bottom_, next.size_);
#endif
#ifdef __x86_64__
    zcomm_simt_switch(&saved_, next.saved_);
#else
    swapcontext(&saved_, &next.saved_);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  // First of all in main(); `from` is where it was switched to from.
  static void enter([[maybe_unused]] Context& from) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &from.bottom_, &from.size_);
#endif
  }

 private:
  std::unique_ptr<std::byte[]> stack_;
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
#ifdef __x86_64__
  void* saved_ = nullptr;
#else
  ucontext_t saved_{};
#endif
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack_ = nullptr;
#endif
};

struct Warp {
  std::uint32_t live = 0;
  std::uint32_t mask = 0;  // of the exchange under way
  std::uint32_t arrived = 0;
  std::uint64_t generation = 0;  // exchanges that are complete
  std::uint64_t slots[2][32];    // two, as a lane may be at the next exchange before another has read

  bool complete() {
    if (arrived == 0 || (mask & live & ~arrived) != 0) return false;
    arrived = 0;
    ++generation;
    return true;
  }
};

struct Thread {
  uint3 index{};
  unsigned lane = 0;
  Warp* warp = nullptr;
  Context* context = nullptr;              // once it has begun
  const std::uint64_t* awaited = nullptr;  // it waits until this changes
  std::uint64_t awaited_generation = 0;
  bool is_done = false;

  bool can_run() const { return !is_done && (awaited == nullptr || *awaited != awaited_generation); }
};

// Runs CTAs. A warp runs until all of its threads are done or wait for other warps; so the fibers of one warp are
// enough for kernels without barriers.
class Executor {
 public:
  void run(dim3 grid, dim3 block, const std::function<void()>& thread) {
    body_ = &thread;
    gridDim = grid;
    blockDim = block;
    for (unsigned z = 0; z < grid.z; ++z) {
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = {x, y, z};
          run_cta(block);
        }
      }
    }
  }

  std::uint64_t exchange(std::uint32_t mask, std::uint64_t value, unsigned source) {
    Thread& thread = *current_;
    Warp& warp = *thread.warp;
    if (((mask >> thread.lane) & 1u) == 0) die("a lane is not in its own mask");
    if (warp.arrived != 0 && warp.mask != mask) die("two masks meet in one exchange");
    std::uint64_t* slots = warp.slots[warp.generation % 2];
    slots[thread.lane] = value;
    warp.mask = mask;
    warp.arrived |= 1u << thread.lane;
    const std::uint64_t generation = warp.generation;
    if (!warp.complete()) wait(warp.generation, generation);
    return slots[source];
  }

  void barrier() {
    ++arrived_;
    const std::uint64_t generation = barrier_generation_;
    if (!complete_barrier()) wait(barrier_generation_, generation);
  }

  unsigned lane() const { return current_->lane; }

 private:
  static void fiber_main();

  bool complete_barrier() {
    if (arrived_ == 0 || arrived_ < num_live_) return false;
    arrived_ = 0;
    ++barrier_generation_;
    return true;
  }

  void wait(const std::uint64_t& counter, std::uint64_t generation) {
    Thread& thread = *current_;
    thread.awaited = &counter;
    thread.awaited_generation = generation;
    thread.context->switch_to(scheduler_);
    thread.awaited = nullptr;
  }

  // Others may have been waiting for the threads that are left without this one.
  void exit_thread() {
    Thread& thread = *current_;
    thread.is_done = true;
    thread.warp->live &= ~(1u << thread.lane);
    thread.warp->complete();
    --num_live_;
    complete_barrier();
  }

  void resume(Thread& thread) {
    if (thread.context == nullptr) {
      if (free_.empty()) {
        contexts_.push_back(std::make_unique<Context>());
        contexts_.back()->make(fiber_main);
        free_.push_back(contexts_.back().get());
      }
      thread.context = free_.back();
      free_.pop_back();
    }
    current_ = &thread;
    threadIdx = thread.index;
    scheduler_.switch_to(*thread.context);
    if (thread.is_done) free_.push_back(thread.context);
  }

  // Whether any thread of the warp could run.
  bool run_warp(std::size_t index, bool reversed) {
    const std::size_t begin = index * 32;
    const std::size_t count = std::min<std::size_t>(32, threads_.size() - begin);
    bool has_run = false;
    for (bool again = true; again;) {
      again = false;
      for (std::size_t i = 0; i < count; ++i) {
        Thread& thread = threads_[begin + (reversed ? count - 1 - i : i)];
        if (!thread.can_run()) continue;
        resume(thread);
        again = has_run = true;
      }
    }
    return has_run;
  }

  void run_cta(dim3 block) {
    const std::size_t num_threads = std::size_t{block.x} * block.y * block.z;
    const std::size_t num_warps = (num_threads + 31) / 32;
    threads_.assign(num_threads, {});
    warps_.assign(num_warps, {});
    for (unsigned i = 0; i < num_threads; ++i) {
      Thread& thread = threads_[i];
      thread.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
      thread.lane = i % 32;
      thread.warp = &warps_[i / 32];
      thread.warp->live |= 1u << thread.lane;
    }
    num_live_ = num_threads;
    arrived_ = 0;
    const bool reversed = blockIdx.x % 2 != 0;  // no order may matter
    while (num_live_ > 0) {
      bool has_run = false;
      for (std::size_t i = 0; i < num_warps; ++i) has_run |= run_warp(reversed ? num_warps - 1 - i : i, reversed);
      if (!has_run) die("deadlock: some threads are at a barrier or shuffle that others do not come to");
    }
  }

  Context scheduler_;  // that this thread was started with
  std::vector<std::unique_ptr<Context>> contexts_;
  std::vector<Context*> free_;
  const std::function<void()>* body_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Thread* current_ = nullptr;
  std::size_t num_live_ = 0;
  std::size_t arrived_ = 0;  // at the barrier
  std::uint64_t barrier_generation_ = 0;
};

Executor& executor() {
  thread_local Executor instance;
  return instance;
}

void Executor::fiber_main() {
  Executor& self = executor();
  Context::enter(self.scheduler_);
  for (;;) {
    (*self.body_)();
    self.exit_thread();
    self.current_->context->switch_to(self.scheduler_);
  }
}

}  // namespace

void run(dim3 grid, dim3 block, const std::function<void()>& thread) { executor().run(grid, block, thread); }
std::uint64_t exchange(std::uint32_t mask, std::uint64_t value, unsigned source) {
  return executor().exchange(mask, value, source);
}
void barrier() { executor().barrier(); }
unsigned lane() { return executor().lane(); }

}  // namespace simt
