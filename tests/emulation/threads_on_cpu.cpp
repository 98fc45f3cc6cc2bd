// What the libraries of all kernels are linked with: the fibers that are threads, copies, barriers.

#include "mma_on_cpu.h"

Index threadIdx;
int late;

// ---- threads ----

std::vector<Cta> ctas;
static std::vector<Fiber> fibers;
std::vector<Meeting> clusters;
Fiber* now;
static jmp_buf home;
int first, threads, cluster_size, ctas_of_grid;
static void (*body)();

void others_first() {
  if (!_setjmp(now->place)) _longjmp(home, 1);
}
void meet(Meeting& m, int count) {
  now->round = m.round, now->at = &m;
  if (++m.arrived == count) m.arrived = 0, m.round++;
  while (now->waits()) others_first();
  now->at = nullptr;
}

static void enter() {
  body();
  now->done = true;
  _longjmp(home, 1);
}
static void go_on(Fiber& fiber) {
  now = &fiber, threadIdx.x = fiber.thread;
  if (_setjmp(home)) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}
static void run_ctas(int size, size_t bytes) {
  ctas.assign(size, Cta{}), clusters.assign(size / cluster_size, Meeting{});
  for (Cta& c : ctas) c.dynamic.assign(bytes, 0x7f), c.fixed.assign(1 << 16, 0x7f);  // NaN
  fibers = std::vector<Fiber>((size_t)size * threads);
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& f = fibers[i];
    f.cta = i / threads, f.thread = i % threads, f.stack.resize(1 << 15);
    f.at = nullptr, f.started = f.done = false;
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.data(), f.start.uc_stack.ss_size = f.stack.size();
    makecontext(&f.start, enter, 0);
  }
  const size_t count = fibers.size();
  for (size_t left = count, round = 0; left; round++) {
    if (round == 1 << 20) std::fprintf(stderr, "threads wait for ever\n"), std::abort();
    for (size_t i = 0; i < count; i++) {
      const size_t turn = (i + round * 37) % count;
      Fiber& fiber = fibers[round % 2 ? turn : count - 1 - turn];
      if (!fiber.waits()) go_on(fiber), left -= fiber.done;
    }
  }
  for (const Cta& c : ctas)
    for (const u64* barrier : c.barriers)
      if (*barrier != BARRIER) std::fprintf(stderr, "a barrier was written over\n"), std::abort();
}
void launch(int grid, int threads_of_cta, int cluster, size_t bytes, void (*kernel)(),
            bool together) {
  body = kernel, threads = threads_of_cta, cluster_size = cluster, ctas_of_grid = grid;
  const int size = together ? grid : cluster;
  for (first = 0; first < grid; first += size) run_ctas(size, bytes);
  fibers = {};  // a library stays loaded, and up to 220 MB of stacks with it
}

// ---- copies ----

namespace {
struct Copy { u32 to; std::vector<char> bytes; };
struct Copies { std::vector<std::vector<Copy>> groups{1}; };
struct Barrier {
  int arrivals, missing, bytes, phase;
  std::vector<Copy> copies;
};
}  // namespace
static std::map<Fiber*, Copies> copies;  // of a thread; the last group is still open
static std::map<std::pair<Cta*, u32>, Barrier> barriers;

static void land(const Copy& copy) {
  if (copy.to + copy.bytes.size() > mine().dynamic.size()) std::abort();
  std::memcpy(dynamic_shared() + copy.to, copy.bytes.data(), copy.bytes.size());
}
void copy(u32 to, const char* from, int bytes, bool there) {
  if (to % bytes || (u64)from % bytes) std::abort();
  Copy c{to, std::vector<char>(bytes)};
  if (there) std::memcpy(c.bytes.data(), from, bytes);
  if (late) copies[now].groups.back().push_back(c);
  else land(c);
}
void cp_async_commit() { copies[now].groups.emplace_back(); }
void wait_for_copies(int left) {
  auto& groups = copies[now].groups;
  while ((int)groups.size() > left + 1) {
    for (const Copy& c : groups.front()) land(c);
    groups.erase(groups.begin());
  }
}

// ---- barriers ----

static void proceed(Barrier& b) {
  if (b.missing < 0) std::fprintf(stderr, "too many arrivals\n"), std::abort();
  if (!b.missing && !b.bytes) b.missing = b.arrivals, b.phase++;
}
void mbarrier_init(u32 barrier, int arrivals) {
  const u32 size = mine().dynamic.size();
  char* at = barrier < size ? dynamic_shared() + barrier : fixed_shared() + (barrier - size);
  mine().barriers.push_back((u64*)at), *(u64*)at = BARRIER;
  barriers[{&mine(), barrier}] = Barrier{arrivals, arrivals, 0, 0};
}
void mbarrier_arrive_expect_tx(u32 barrier, int bytes) {
  Barrier& b = barriers.at({&mine(), barrier});
  b.bytes += bytes, b.missing--;
  proceed(b);
}
void expect_tx(u32 barrier, int bytes) { barriers.at({&mine(), barrier}).bytes += bytes; }
static void land(Cta& cta, Barrier& b, const Copy& c) {
  if (c.to + c.bytes.size() > cta.dynamic.size()) std::abort();
  std::memcpy(cta.dynamic.data() + c.to, c.bytes.data(), c.bytes.size());
  b.bytes -= c.bytes.size();
  proceed(b);
}
void counted_copy(Cta& cta, u32 to, const void* from, int bytes, u32 barrier) {
  if (to % 16 || bytes % 16 || bytes <= 0) std::abort();
  Barrier& b = barriers.at({&cta, barrier});
  const Copy c{to, std::vector<char>((const char*)from, (const char*)from + bytes)};
  if (late) b.copies.push_back(c);
  else land(cta, b, c);
}
void mbarrier_wait(u32 barrier, u32 parity, const char*) {
  for (;; others_first()) {
    Barrier& b = barriers.at({&mine(), barrier});
    for (const Copy& c : std::exchange(b.copies, {})) land(mine(), b, c);
    if ((b.phase & 1) != (int)parity) return;
  }
}
