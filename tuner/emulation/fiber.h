// Fibers: stacks that one host thread switches between, on any platform with ucontext.
//
// makecontext alone can start on a new stack, but swapcontext costs two system calls, so switches are made by _setjmp
// and _longjmp: some ten nanoseconds. AddressSanitizer takes a longjmp for an unwinding of the stack; with it,
// swapcontext does the switching and the sanitizer is told of each.
#pragma once

#include <setjmp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <new>

#include "sanitizer.h"

namespace emulation {

class Fiber;

// The side of the host thread that resumes fibers.
struct FiberHost {
  jmp_buf jump;
  ucontext_t context;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
};

class Fiber {
 public:
  using Body = void (*)(void* argument);

  // `body` must never return.
  Fiber(Body body, void* argument) : body_(body), argument_(argument) {
    // A page that faults below the stack turns an overflow into a crash instead of a neighbour's wrong result.
    mapping_ = static_cast<char*>(
        mmap(nullptr, kMappingBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (mapping_ == MAP_FAILED) throw std::bad_alloc();
    if (mprotect(mapping_, kGuardBytes, PROT_NONE) != 0) {
      munmap(mapping_, kMappingBytes);
      throw std::bad_alloc();
    }
  }
  ~Fiber() {
    unpoison(stack(), kStackBytes);
    munmap(mapping_, kMappingBytes);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the fiber until it calls `yield`.
  void resume(FiberHost& host) {
    host_ = &host;
#if EMULATION_ASAN
    if (!started_) prepare();
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, stack(), kStackBytes);
    swapcontext(&host.context, &context_);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    if (_setjmp(host.jump) != 0) return;
    if (started_) _longjmp(jump_, 1);
    prepare();
    setcontext(&context_);
#endif
  }

  void yield() {
#if EMULATION_ASAN
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, host_->stack, host_->stack_bytes);
    swapcontext(&context_, &host_->context);
    __sanitizer_finish_switch_fiber(fake_stack, &host_->stack, &host_->stack_bytes);
#else
    if (_setjmp(jump_) == 0) _longjmp(host_->jump, 1);
#endif
  }

 private:
  static constexpr size_t kGuardBytes = 64 * 1024;  // a whole page wherever pages are at most that large
  // Only touched pages cost memory. AddressSanitizer, however, clears its shadow of all of it at each switch.
  static constexpr size_t kStackBytes = (EMULATION_ASAN ? 128 : 256) * 1024;
  static constexpr size_t kMappingBytes = kGuardBytes + kStackBytes;

  char* stack() const { return mapping_ + kGuardBytes; }

  void prepare() {
    started_ = true;
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack();
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    // makecontext passes ints: the pointer travels as two halves.
    const uintptr_t self = reinterpret_cast<uintptr_t>(this);
    makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, unsigned(self >> 32), unsigned(self));
  }

  static void enter(unsigned high, unsigned low) {
    Fiber* self = reinterpret_cast<Fiber*>(uintptr_t(high) << 32 | low);
#if EMULATION_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &self->host_->stack, &self->host_->stack_bytes);
#endif
    self->body_(self->argument_);
  }

  Body body_;
  void* argument_;
  char* mapping_;
  FiberHost* host_ = nullptr;
  bool started_ = false;
  jmp_buf jump_;
  ucontext_t context_;
};

}  // namespace emulation
