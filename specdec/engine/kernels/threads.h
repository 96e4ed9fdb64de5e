// Threads that share a loop.

#pragma once

#include "simd.h"

namespace {

// How threads wait for each other within a call. A waiting thread looks for what is to change, and
// between looks lets others have the core: a thread that spins instead may burn the turn that the other
// one waits for, and one that sleeps takes longer to wake than many a loop here takes. Where a look
// lasted long, other programs did want the core: then threads sleep for a number of waits before they
// look so long again, twice as many each time. One for all threads of a process.
constexpr int kSpins = 1000, kLooks = 3000;
constexpr int64_t kFirstCalm = 16, kMostCalm = 4096;
constexpr std::chrono::microseconds kLongLook(700);
constexpr int64_t kLine = 64;  // bytes of a line of the caches

inline void relax() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Which cores threads run on. Where the system does not tell, nothing is changed.
#if defined(__linux__)
inline int get_core() { return sched_getcpu(); }
inline int get_thread() { return static_cast<int>(syscall(SYS_gettid)); }
inline int get_process() { return static_cast<int>(getpid()); }

// Moves `thread` to this core, or to another one that `leader` may use.
inline void move(int thread, bool is_to, int core, int leader) {
  cpu_set_t cores;
  if (core < 0 || sched_getaffinity(leader, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) < 2) return;
  if (is_to) {
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

  void wait(uint32_t before) {  // until it is another number
    for (int i = 0; i < kSpins; ++i) {
      if (read() != before) return;
      relax();
    }
    if (calm_.load(std::memory_order_relaxed) > 0) {
      calm_.fetch_sub(1, std::memory_order_relaxed);
    } else {
      auto looked = std::chrono::steady_clock::now();
      for (int i = 0; i < kLooks; ++i) {
        std::this_thread::yield();
        const auto now = std::chrono::steady_clock::now();
        if (now - looked > kLongLook) {
          const int64_t calm = std::min(2 * last_calm_.load(std::memory_order_relaxed), kMostCalm);
          last_calm_.store(calm, std::memory_order_relaxed);
          calm_.store(calm, std::memory_order_relaxed);
          if (read() != before) return;
          break;
        }
        looked = now;
        if (read() != before) {
          last_calm_.store(kFirstCalm / 2, std::memory_order_relaxed);
          return;
        }
      }
    }
    sleep_until(before);
  }

  void sleep_until(uint32_t before) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (number_.load(std::memory_order_seq_cst) == before) sleep(before);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
#if defined(__linux__)
  void sleep(uint32_t before) {
    syscall(SYS_futex, &number_, FUTEX_WAIT_PRIVATE, before, nullptr, nullptr, 0);
  }
  void wake() { syscall(SYS_futex, &number_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
  void wake() {}
#endif

  std::atomic<uint32_t> number_{0};
  std::atomic<int> sleepers_{0};
  inline static std::atomic<int64_t> calm_{0}, last_calm_{kFirstCalm / 2};
};

// Loops are shared by pieces: a thread takes the pieces of its own part in order, and then pieces from
// the ends of the others' parts. So a thread that the system lets wait, for another program or another
// thread, holds the loop up for one piece only. Where a loop's results can be put down by any thread,
// the leader does even that piece again, and goes on without the other one. Which thread computes a
// result changes none of its bits.
//
// State of a piece: the number of the loop that took it last, and one of these.
enum PieceState : uint32_t { kTaken, kPutting, kRevoked, kDone };

typedef std::atomic<uint32_t> Piece;

// A thread's hold on a piece.
class Hold {
 public:
  Hold() = default;
  Hold(Piece *piece, uint32_t number) : piece_(piece), number_(8 * number) {}

  // Runs `write`, which puts results down, unless the piece was given to the leader: then nothing that
  // is computed of it counts any more.
  template <typename F>
  bool put(const F &write) const {
    if (piece_ == nullptr) return write(), true;
    if (!change(kTaken, kPutting)) return false;
    write();
    piece_->store(number_ | kTaken, std::memory_order_release);
    return true;
  }

  // Takes the piece for this thread if it is nobody's in this loop. Numbers begin again after 2^29 loops.
  bool take() const {
    uint32_t seen = piece_->load(std::memory_order_acquire);
    return static_cast<int32_t>(seen - number_) < 0 &&
           piece_->compare_exchange_strong(seen, number_ | kTaken, std::memory_order_acq_rel);
  }

  bool change(PieceState from, PieceState to) const {
    uint32_t seen = number_ | from;
    return piece_->compare_exchange_strong(seen, number_ | to, std::memory_order_acq_rel);
  }

  bool is(PieceState state) const {
    return piece_->load(std::memory_order_acquire) == (number_ | state);
  }

  void set(PieceState state) const { piece_->store(number_ | state, std::memory_order_release); }

 private:
  Piece *piece_ = nullptr;  // null where the thread is alone with it
  uint32_t number_ = 0;
};

// A loop that is shared: `size` rounds, of which each of `parts` members has a part, by `pieces` of
// `rounds`. `run` calls what is in `body`.
struct Loop {
  static constexpr int64_t kMostPieces = 64;  // of a part
  bool is_repeatable = false;
  int64_t size = 0, parts = 1, rounds = 1, pieces = 1;
  void (*run)(const void *body, const Hold &hold, int64_t begin, int64_t end) = nullptr;
  alignas(16) char body[384] = {};

  void call(const Hold &hold, int64_t part, int64_t piece) const {
    const int64_t last = size * (part + 1) / parts, begin = size * part / parts + piece * rounds;
    if (begin < last) run(body, hold, begin, std::min(begin + rounds, last));
  }
};

class Crew;
thread_local Crew *current_crew = nullptr;  // of the thread that leads it
thread_local int64_t num_threads = 1;  // that share the calling thread's loops, with itself

// The threads that share one thread's loops: that one is their leader, runs what lies between loops, and
// waits for no member that has nothing to do.
class Crew {
 public:
  const int64_t count;

  explicit Crew(int64_t members)
      : count(members), pieces_(members * Loop::kMostPieces), seats_(members) {}

  // The calling thread's own, of so many threads with itself.
  static Crew &get(int64_t members) {
    static thread_local Owner owner;
    if (owner.crew == nullptr || owner.crew->count != members || owner.process != get_process()) {
      owner.dismiss();
      owner.crew = std::make_shared<Crew>(members);
      owner.process = get_process();
      for (int64_t i = 1; i < members; ++i)
        std::thread([crew = owner.crew, i] { crew->serve(i); }).detach();
    }
    return *owner.crew;
  }

  template <typename F>
  void lead(const F &body) {
    for (Piece &piece : pieces_) Hold(&piece, begun_.read()).set(kDone);
    current_crew = this;
    body();
    current_crew = nullptr;
    settle();
  }

  // Runs body(hold, begin, end) for all of `size` rounds, at least so many at a time.
  template <typename F>
  void run(int64_t size, int64_t least, bool is_repeatable, const F &body) {
    static_assert(std::is_trivially_copyable<F>::value && sizeof(F) <= sizeof Loop::body, "");
    const auto began = Clock::now();
    const uint32_t number = begun_.read() + 1;
    prepared_.store(number, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    // A part is taken by 16 turns where two threads share a loop, and by fewer where more do.
    const int64_t turns = std::max<int64_t>(32 / count, 4), part = (size + count - 1) / count;
    const int64_t most = size / (turns * count);
    const int64_t few = (part + Loop::kMostPieces - 1) / Loop::kMostPieces;
    loop_.is_repeatable = is_repeatable;
    loop_.size = size;
    loop_.parts = count;
    loop_.rounds = std::max({most / least * least, least, few});
    loop_.pieces = (part + loop_.rounds - 1) / loop_.rounds;
    loop_.run = [](const void *given, const Hold &hold, int64_t begin, int64_t end) {
      (*static_cast<const F *>(given))(hold, begin, end);
    };
    std::memcpy(loop_.body, &body, sizeof body);
    left_.store(static_cast<uint64_t>(number) << 32 | static_cast<uint64_t>(count * loop_.pieces),
                std::memory_order_relaxed);
    const int core = get_core();
    if (core_.load(std::memory_order_relaxed) != core) core_.store(core, std::memory_order_relaxed);
    begun_.raise();
    current_crew = nullptr;  // a loop within a loop is the member's own
    work(loop_, number, 0);
    finish(number, began);
    current_crew = this;
  }

  // Until no member computes what no longer counts: before what it reads is given back.
  void settle() {
    for (Seat &seat : seats_) wait_for(seat);
  }

 private:
  typedef std::chrono::steady_clock Clock;

  struct alignas(kLine) Seat {
    std::atomic<bool> is_busy{false};
    std::atomic<int> thread{0};
  };

  struct Owner {
    std::shared_ptr<Crew> crew;
    int process = 0;  // a fork's child has the crew and no members

    ~Owner() { dismiss(); }
    void dismiss() {
      if (crew == nullptr || process != get_process()) return;
      crew->is_over_.store(true, std::memory_order_relaxed);
      crew->begun_.raise();
    }
  };

  void serve(int64_t index) {
    Seat &seat = seats_[index];
    seat.thread.store(get_thread(), std::memory_order_relaxed);
    for (uint32_t number = 0;;) {
      begun_.wait(number);
      number = begun_.read();
      if (is_over_.load(std::memory_order_relaxed)) return;
      const int core = core_.load(std::memory_order_relaxed);
      // Where another program keeps a core busy, the system likes to put threads that wait for each
      // other on one of the others, where they take turns.
      if (get_core() == core) move(0, false, core, leader_);
      seat.is_busy.store(true, std::memory_order_seq_cst);
      const Loop loop = loop_;
      std::atomic_thread_fence(std::memory_order_acquire);
      // Else the leader has gone on, and this may be a mixture of two loops.
      if (prepared_.load(std::memory_order_relaxed) == number) work(loop, number, index);
      seat.is_busy.store(false, std::memory_order_seq_cst);
      if (is_awaited_.load(std::memory_order_seq_cst)) free_.raise();
    }
  }

  // Until it is not busy. A member that the system lets wait for another program gets the leader's core
  // while the leader sleeps.
  void wait_for(Seat &seat) {
    const auto is_busy = [&] { return seat.is_busy.load(std::memory_order_seq_cst); };
    for (int i = 0; i < kSpins && is_busy(); ++i) relax();
    if (!is_busy()) return;
    const int core = get_core(), thread = seat.thread.load(std::memory_order_relaxed);
    is_awaited_.store(true, std::memory_order_seq_cst);
    move(thread, true, core, leader_);
    for (uint32_t before = free_.read(); is_busy(); before = free_.read()) free_.sleep_until(before);
    move(thread, false, core, leader_);
    is_awaited_.store(false, std::memory_order_relaxed);
  }

  Hold get(const Loop &loop, uint32_t number, int64_t part, int64_t piece) {
    return {&pieces_[part * loop.pieces + piece], number};
  }

  void work(const Loop &loop, uint32_t number, int64_t index) {
    int64_t done = 0;
    for (int64_t i = 0; i < loop.parts; ++i) {
      const int64_t part = (index + i) % loop.parts;
      for (int64_t at = 0; at < loop.pieces; ++at) {
        const int64_t piece = i == 0 ? at : loop.pieces - 1 - at;
        const Hold hold = get(loop, number, part, piece);
        if (!hold.take()) continue;
        loop.call(loop.is_repeatable && index > 0 ? hold : Hold(), part, piece);
        done += hold.change(kTaken, kDone);
      }
    }
    uint64_t seen = left_.load(std::memory_order_relaxed);
    while (done > 0 && seen >> 32 == number)
      if (left_.compare_exchange_weak(seen, seen - done, std::memory_order_acq_rel)) break;
  }

  // Until all pieces are done. Where other threads take much longer than the loop did so far, the leader
  // computes what may be repeated by itself.
  void finish(uint32_t number, Clock::time_point began) {
    const auto is_done = [&] {
      return static_cast<uint32_t>(left_.load(std::memory_order_acquire)) == 0;
    };
    if (is_done()) return;
    const auto now = Clock::now(), end = now + std::max<Clock::duration>(kPatience, (now - began) / 4);
    for (int64_t i = 1; i % 64 != 0 || Clock::now() < end; ++i) {
      if (is_done()) return;
      relax();
    }
    if (!loop_.is_repeatable) return settle();  // who is not busy has done all its pieces
    for (int64_t part = 0; part < count; ++part)
      for (int64_t piece = 0; piece < loop_.pieces; ++piece) {
        const Hold hold = get(loop_, number, part, piece);
        while (!hold.is(kDone)) {
          if (hold.change(kTaken, kRevoked)) {
            loop_.call(Hold(), part, piece);
            hold.set(kDone);
          } else {
            std::this_thread::yield();  // its results are put down
          }
        }
      }
  }

  static constexpr std::chrono::microseconds kPatience{30};
  Loop loop_;
  std::vector<Piece> pieces_;
  std::vector<Seat> seats_;
  Signal begun_, free_;
  std::atomic<uint32_t> prepared_{0};  // the number of the loop that is in loop_
  std::atomic<uint64_t> left_{0};  // that number, and how many pieces are not known to be done
  std::atomic<bool> is_over_{false}, is_awaited_{false};
  const int leader_ = get_thread();
  alignas(kLine) std::atomic<int> core_{-1};  // where the leader was when the last loop began
};

// Runs `body` with a crew for all loops in it, if they are long enough for several threads.
template <typename F>
void with_crew(bool is_long, const F &body) {
  if (!is_long || current_crew != nullptr || num_threads == 1) return body();
  Crew::get(num_threads).lead(body);
}

// Runs body(begin, end) for all of `size` rounds, in all threads if it is long.
template <typename F>
void share(int64_t size, bool is_long, const F &body) {
  if (size == 0) return;
  if (!is_long) return body(0, size);
  with_crew(true, [&] {
    if (current_crew == nullptr) return body(0, size);
    current_crew->run(size, 1, false,
                      [&body](const Hold &, int64_t begin, int64_t end) { body(begin, end); });
  });
}

// Runs body(hold, begin, end) for all of `size` rounds, some perhaps twice, at least `least` rounds at
// a time. The body holds all that it needs by value, and puts results down by `hold` only. What it
// reads is there until the crew is gone, or `settle` was called.
template <typename F>
void share_repeatable(int64_t size, int64_t least, bool is_long, const F &body) {
  if (size == 0) return;
  if (!is_long) return body(Hold(), 0, size);
  with_crew(true, [&] {
    if (current_crew == nullptr) return body(Hold(), 0, size);
    current_crew->run(size, least, true, body);
  });
}

template <typename F>
void for_each(int64_t size, bool is_long, const F &body) {
  share(size, is_long, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

inline int64_t count_threads() {
  return current_crew != nullptr ? current_crew->count : num_threads;
}

// Where it ends, no member reads any more what was given to loops that may be repeated.
struct Settling {
  ~Settling() {
    if (current_crew != nullptr) current_crew->settle();
  }
};

// Memory of this thread for what loops read: nothing is taken away from a member that reads it late.
template <typename T>
T *borrow(std::vector<T> &memory, int64_t size) {
  if (static_cast<int64_t>(memory.size()) < size) {
    if (current_crew != nullptr) current_crew->settle();
    memory.resize(size);
  }
  return memory.data();
}

// Below this many multiply-adds a thread team costs more than it saves.
constexpr int64_t kParallelWork = 1 << 15;

}  // namespace
