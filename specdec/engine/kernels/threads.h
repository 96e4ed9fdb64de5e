// Threads that share a loop.

#pragma once

#include "simd.h"

namespace {

// Waits of threads for each other within a call. A waiting thread looks for what is to change, and
// between looks lets others have the core: a thread that spins instead may burn the turn that the other
// one waits for, and one that sleeps takes longer to wake than many a loop here takes. Where a look
// lasted long, other programs did want the core: then threads sleep for a number of waits before they
// look so long again, twice as many each time. One for all threads of a process.
constexpr int kSpins = 1000;  // looks without letting others have the core
constexpr int kYields = 3000;  // looks between which others may have it
constexpr int64_t kMinCalm = 16;  // waits without looks after the first long one
constexpr int64_t kMaxCalm = 4096;  // waits without looks at most
constexpr std::chrono::microseconds kLongYield(700);  // a look that lasted so long was another program's
constexpr int64_t kLine = 64;  // bytes of a line of the caches

inline void relax() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Cores that threads run on. Where the system does not tell, nothing is changed.
#if defined(__linux__)
inline int get_core() { return sched_getcpu(); }
inline int get_thread() { return static_cast<int>(syscall(SYS_gettid)); }
inline int get_process() { return static_cast<int>(getpid()); }

// Moves `thread` to this core, or to another one that `leader` may use.
inline void move(int thread, bool moves_to, int core, int leader) {
  cpu_set_t cores;
  if (core < 0 || sched_getaffinity(leader, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) < 2) return;
  if (moves_to) {
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
  } else {
    CPU_CLR(core, &cores);
  }
  sched_setaffinity(thread, sizeof cores, &cores);
}
#else
inline int get_core() { return -1; }
inline int get_thread() { return 0; }
inline int get_process() { return 0; }
inline void move(int, bool, int, int) {}
#endif

// A number that one thread raises and others wait for.
class Signal {
 public:
  uint32_t read() const { return number_.load(std::memory_order_acquire); }

  void raise() {
    number_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
  }

  void wait(uint32_t old_number) {  // until it is another number
    for (int i = 0; i < kSpins; ++i) {
      if (read() != old_number) return;
      relax();
    }
    if (calm_.load(std::memory_order_relaxed) > 0) {
      calm_.fetch_sub(1, std::memory_order_relaxed);
    } else {
      auto yielded = std::chrono::steady_clock::now();
      for (int i = 0; i < kYields; ++i) {
        std::this_thread::yield();
        const auto now = std::chrono::steady_clock::now();
        if (now - yielded > kLongYield) {
          const int64_t calm = std::min(2 * last_calm_.load(std::memory_order_relaxed), kMaxCalm);
          last_calm_.store(calm, std::memory_order_relaxed);
          calm_.store(calm, std::memory_order_relaxed);
          if (read() != old_number) return;
          break;
        }
        yielded = now;
        if (read() != old_number) {
          last_calm_.store(kMinCalm / 2, std::memory_order_relaxed);
          return;
        }
      }
    }
    sleep_until(old_number);
  }

  void sleep_until(uint32_t old_number) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (number_.load(std::memory_order_seq_cst) == old_number) sleep(old_number);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
#if defined(__linux__)
  void sleep(uint32_t old_number) {
    syscall(SYS_futex, &number_, FUTEX_WAIT_PRIVATE, old_number, nullptr, nullptr, 0);
  }
  void wake() { syscall(SYS_futex, &number_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
  void wake() {}
#endif

  std::atomic<uint32_t> number_{0};
  std::atomic<int> sleepers_{0};
  inline static std::atomic<int64_t> calm_{0}, last_calm_{kMinCalm / 2};
};

// A loop is shared by chunks of its rounds: a thread takes the chunks of its own section in order, and
// then chunks from the ends of the others' sections. So a thread that the system lets wait, for another
// program or another thread, delays the loop by one chunk only. Where a loop's results can be written by
// any thread, the leader computes even that chunk again, and goes on without the other one. Which thread
// computes a result changes none of its bits.
//
// State of a chunk: the number of the loop that took it last, and one of these.
enum ChunkStatus : uint32_t { kTaken, kWriting, kRevoked, kDone };

typedef std::atomic<uint32_t> ChunkState;

// A thread's claim on a chunk.
class ChunkClaim {
 public:
  ChunkClaim() = default;
  ChunkClaim(ChunkState *chunk, uint32_t number) : state_(chunk), number_(8 * number) {}

  // Runs `write_results`, unless the chunk was given to the leader: then nothing that is computed of it
  // counts any more.
  template <typename F>
  bool write(const F &write_results) const {
    if (state_ == nullptr) return write_results(), true;
    if (!change(kTaken, kWriting)) return false;
    write_results();
    state_->store(number_ | kTaken, std::memory_order_release);
    return true;
  }

  // Takes the chunk for this thread if no thread has it in this loop. Numbers begin again after 2^29 loops.
  bool take() const {
    uint32_t state = state_->load(std::memory_order_acquire);
    return static_cast<int32_t>(state - number_) < 0 &&
           state_->compare_exchange_strong(state, number_ | kTaken, std::memory_order_acq_rel);
  }

  bool change(ChunkStatus from, ChunkStatus to) const {
    uint32_t state = number_ | from;
    return state_->compare_exchange_strong(state, number_ | to, std::memory_order_acq_rel);
  }

  bool is(ChunkStatus status) const {
    return state_->load(std::memory_order_acquire) == (number_ | status);
  }

  void set(ChunkStatus status) const { state_->store(number_ | status, std::memory_order_release); }

 private:
  ChunkState *state_ = nullptr;  // null where no other thread may take it
  uint32_t number_ = 0;
};

// A loop that is shared: `size` rounds, of which each of `num_sections` members has a section, in
// `num_chunks` chunks of `chunk_size` rounds. `run` calls what is in `body`.
struct Loop {
  static constexpr int64_t kMaxChunks = 64;  // of a section
  bool is_repeatable = false;
  int64_t size = 0, num_sections = 1, chunk_size = 1, num_chunks = 1;
  void (*run)(const void *body, const ChunkClaim &claim, int64_t begin, int64_t end) = nullptr;
  alignas(16) char body[384] = {};

  void call(const ChunkClaim &claim, int64_t section, int64_t chunk) const {
    const int64_t end = size * (section + 1) / num_sections;
    const int64_t begin = size * section / num_sections + chunk * chunk_size;
    if (begin < end) run(body, claim, begin, std::min(begin + chunk_size, end));
  }
};

class ThreadTeam;
thread_local ThreadTeam *current_team = nullptr;  // of the thread that leads it
thread_local int64_t num_threads = 1;  // that share the calling thread's loops, with itself

// Team of threads that share one thread's loops: that one is their leader, runs what lies between loops,
// and waits for no member that has nothing to do.
class ThreadTeam {
 public:
  const int64_t count;

  explicit ThreadTeam(int64_t members)
      : count(members), chunk_states_(members * Loop::kMaxChunks), members_(members) {}

  // Returns the calling thread's team, of so many threads with itself.
  static ThreadTeam &get(int64_t members) {
    static thread_local Owner owner;
    if (owner.team == nullptr || owner.team->count != members || owner.process != get_process()) {
      owner.dismiss();
      owner.team = std::make_shared<ThreadTeam>(members);
      owner.process = get_process();
      for (int64_t i = 1; i < members; ++i)
        std::thread([team = owner.team, i] { team->serve(i); }).detach();
    }
    return *owner.team;
  }

  template <typename F>
  void lead(const F &body) {
    for (ChunkState &chunk : chunk_states_) ChunkClaim(&chunk, loop_signal_.read()).set(kDone);
    current_team = this;
    body();
    current_team = nullptr;
    wait_for_members();
  }

  // Runs body(claim, begin, end) for all of `size` rounds, at least `min_rounds` at a time.
  template <typename F>
  void run(int64_t size, int64_t min_rounds, bool is_repeatable, const F &body) {
    static_assert(std::is_trivially_copyable<F>::value && sizeof(F) <= sizeof Loop::body, "");
    const auto start_time = Clock::now();
    const uint32_t number = loop_signal_.read() + 1;
    loop_number_.store(number, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    // A section has 16 chunks where two threads share a loop, and fewer where more do.
    const int64_t max_chunks = std::max<int64_t>(32 / count, 4), section_size = (size + count - 1) / count;
    const int64_t rounds = size / (max_chunks * count);
    const int64_t least_rounds = (section_size + Loop::kMaxChunks - 1) / Loop::kMaxChunks;
    loop_.is_repeatable = is_repeatable;
    loop_.size = size;
    loop_.num_sections = count;
    loop_.chunk_size = std::max({rounds / min_rounds * min_rounds, min_rounds, least_rounds});
    loop_.num_chunks = (section_size + loop_.chunk_size - 1) / loop_.chunk_size;
    loop_.run = [](const void *loop_body, const ChunkClaim &claim, int64_t begin, int64_t end) {
      (*static_cast<const F *>(loop_body))(claim, begin, end);
    };
    std::memcpy(loop_.body, &body, sizeof body);
    num_left_.store(static_cast<uint64_t>(number) << 32 | static_cast<uint64_t>(count * loop_.num_chunks),
                std::memory_order_relaxed);
    const int core = get_core();
    if (leader_core_.load(std::memory_order_relaxed) != core)
      leader_core_.store(core, std::memory_order_relaxed);
    loop_signal_.raise();
    current_team = nullptr;  // a loop within a loop is the member's own
    work(loop_, number, 0);
    finish(number, start_time);
    current_team = this;
  }

  // Waits until no member computes what no longer counts: before the memory that it reads is freed.
  void wait_for_members() {
    for (Member &member : members_) wait_for_member(member);
  }

 private:
  typedef std::chrono::steady_clock Clock;

  struct alignas(kLine) Member {
    std::atomic<bool> is_busy{false};
    std::atomic<int> thread{0};
  };

  struct Owner {
    std::shared_ptr<ThreadTeam> team;
    int process = 0;  // a fork's child has the team and no members

    ~Owner() { dismiss(); }
    void dismiss() {
      if (team == nullptr || process != get_process()) return;
      team->is_over_.store(true, std::memory_order_relaxed);
      team->loop_signal_.raise();
    }
  };

  void serve(int64_t index) {
    Member &member = members_[index];
    member.thread.store(get_thread(), std::memory_order_relaxed);
    for (uint32_t number = 0;;) {
      loop_signal_.wait(number);
      number = loop_signal_.read();
      if (is_over_.load(std::memory_order_relaxed)) return;
      const int core = leader_core_.load(std::memory_order_relaxed);
      // Where another program keeps a core busy, the system likes to put threads that wait for each
      // other on one of the others, where they take turns.
      if (get_core() == core) move(0, false, core, leader_);
      member.is_busy.store(true, std::memory_order_seq_cst);
      const Loop loop = loop_;
      std::atomic_thread_fence(std::memory_order_acquire);
      // Else the leader has gone on, and this may be a mixture of two loops.
      if (loop_number_.load(std::memory_order_relaxed) == number) work(loop, number, index);
      member.is_busy.store(false, std::memory_order_seq_cst);
      if (is_awaited_.load(std::memory_order_seq_cst)) idle_signal_.raise();
    }
  }

  // Waits until a member is not busy. A member that the system lets wait for another program gets the
  // leader's core while the leader sleeps.
  void wait_for_member(Member &member) {
    const auto is_busy = [&] { return member.is_busy.load(std::memory_order_seq_cst); };
    for (int i = 0; i < kSpins && is_busy(); ++i) relax();
    if (!is_busy()) return;
    const int core = get_core(), thread = member.thread.load(std::memory_order_relaxed);
    is_awaited_.store(true, std::memory_order_seq_cst);
    move(thread, true, core, leader_);
    for (uint32_t old_number = idle_signal_.read(); is_busy(); old_number = idle_signal_.read())
      idle_signal_.sleep_until(old_number);
    move(thread, false, core, leader_);
    is_awaited_.store(false, std::memory_order_relaxed);
  }

  ChunkClaim get(const Loop &loop, uint32_t number, int64_t section, int64_t chunk) {
    return {&chunk_states_[section * loop.num_chunks + chunk], number};
  }

  void work(const Loop &loop, uint32_t number, int64_t index) {
    int64_t num_done = 0;
    for (int64_t i = 0; i < loop.num_sections; ++i) {
      const int64_t section = (index + i) % loop.num_sections;
      for (int64_t turn = 0; turn < loop.num_chunks; ++turn) {
        const int64_t chunk = i == 0 ? turn : loop.num_chunks - 1 - turn;
        const ChunkClaim claim = get(loop, number, section, chunk);
        if (!claim.take()) continue;
        loop.call(loop.is_repeatable && index > 0 ? claim : ChunkClaim(), section, chunk);
        num_done += claim.change(kTaken, kDone);
      }
    }
    uint64_t num_left = num_left_.load(std::memory_order_relaxed);
    while (num_done > 0 && num_left >> 32 == number)
      if (num_left_.compare_exchange_weak(num_left, num_left - num_done, std::memory_order_acq_rel)) break;
  }

  // Waits until all chunks are done. Where other threads take much longer than the loop did so far, the
  // leader computes what may be repeated by itself.
  void finish(uint32_t number, Clock::time_point start_time) {
    const auto is_done = [&] {
      return static_cast<uint32_t>(num_left_.load(std::memory_order_acquire)) == 0;
    };
    if (is_done()) return;
    const auto now = Clock::now(), end = now + std::max<Clock::duration>(kPatience, (now - start_time) / 4);
    for (int64_t i = 1; i % 64 != 0 || Clock::now() < end; ++i) {
      if (is_done()) return;
      relax();
    }
    if (!loop_.is_repeatable) return wait_for_members();  // a member that is not busy has done all its chunks
    for (int64_t section = 0; section < count; ++section)
      for (int64_t chunk = 0; chunk < loop_.num_chunks; ++chunk) {
        const ChunkClaim claim = get(loop_, number, section, chunk);
        while (!claim.is(kDone)) {
          if (claim.change(kTaken, kRevoked)) {
            loop_.call(ChunkClaim(), section, chunk);
            claim.set(kDone);
          } else {
            std::this_thread::yield();  // its results are being written
          }
        }
      }
  }

  static constexpr std::chrono::microseconds kPatience{30};
  Loop loop_;
  std::vector<ChunkState> chunk_states_;
  std::vector<Member> members_;
  Signal loop_signal_, idle_signal_;
  std::atomic<uint32_t> loop_number_{0};  // the number of the loop that is in loop_
  std::atomic<uint64_t> num_left_{0};  // that number, and how many chunks are not known to be done
  std::atomic<bool> is_over_{false}, is_awaited_{false};
  const int leader_ = get_thread();
  alignas(kLine) std::atomic<int> leader_core_{-1};  // where the leader ran when the last loop began
};

// Runs `body` with a team for all loops in it, if they are long enough for several threads.
template <typename F>
void run_in_team(bool is_long, const F &body) {
  if (!is_long || current_team != nullptr || num_threads == 1) return body();
  ThreadTeam::get(num_threads).lead(body);
}

// Runs body(begin, end) for all of `size` rounds, in all threads if it is long.
template <typename F>
void share(int64_t size, bool is_long, const F &body) {
  if (size == 0) return;
  if (!is_long) return body(0, size);
  run_in_team(true, [&] {
    if (current_team == nullptr) return body(0, size);
    current_team->run(size, 1, false,
                      [&body](const ChunkClaim &, int64_t begin, int64_t end) { body(begin, end); });
  });
}

// Runs body(claim, begin, end) for all of `size` rounds, some perhaps twice, at least `min_rounds` rounds
// at a time. The body has all that it needs by value, and writes results by `claim` only. What it reads
// is there until the team is gone, or `wait_for_members` was called.
template <typename F>
void share_repeatable(int64_t size, int64_t min_rounds, bool is_long, const F &body) {
  if (size == 0) return;
  if (!is_long) return body(ChunkClaim(), 0, size);
  run_in_team(true, [&] {
    if (current_team == nullptr) return body(ChunkClaim(), 0, size);
    current_team->run(size, min_rounds, true, body);
  });
}

template <typename F>
void for_each(int64_t size, bool is_long, const F &body) {
  share(size, is_long, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

inline int64_t count_threads() {
  return current_team != nullptr ? current_team->count : num_threads;
}

// Scope at whose end no member reads any more what was given to loops that may be repeated.
struct MembersWait {
  ~MembersWait() {
    if (current_team != nullptr) current_team->wait_for_members();
  }
};

// Returns memory of this thread for what loops read; it is not moved while a member reads it late.
template <typename T>
T *reserve(std::vector<T> &memory, int64_t size) {
  if (static_cast<int64_t>(memory.size()) < size) {
    if (current_team != nullptr) current_team->wait_for_members();
    memory.resize(size);
  }
  return memory.data();
}

// Below this many multiply-adds a thread team costs more than it saves.
constexpr int64_t kParallelWork = 1 << 15;

}  // namespace
