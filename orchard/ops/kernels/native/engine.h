// The engine: a plan (steps over numbered buffers) and what runs it. Steps are described in orchard/ops/plan/steps.py.
//
// Every thread walks through all steps and does its share of each; barriers stand where a step needs what another thread
// made. Few rows (decoding) go through 8-bit dot products, each thread preparing the input by itself, which costs less than
// meeting once more. Many rows (reading a prompt) go through matrix units where there are any.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "vector.h"
#include "watch.h"

namespace orchard {

// 64-byte aligned memory that starts as zeros and is only taken from the system where it is touched.
class Block {
  public:
    Block() = default;
    explicit Block(size_t bytes);
    ~Block();
    Block(Block&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr, other.bytes_ = 0; }
    Block& operator=(Block&& other) noexcept;
    // At least this many bytes; what was there is lost when it grows.
    void reserve(size_t bytes) {
        if (bytes > bytes_) *this = Block(bytes);
    }
    template <class T> T* as() const { return reinterpret_cast<T*>(data_); }
    size_t bytes() const { return bytes_; }

  private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

struct NormRef {
    const float* weight = nullptr;  // null: no norm
    float eps = 0;
};

struct OutputRef {
    Weight weight;
    const float* gain = nullptr;  // what each row's product is multiplied with, before its bias is added; null: nothing
    const float* bias = nullptr;
    int to = 0;
    bool add = false;
};

enum class StepKind : int { Embed, Linear, Gated, Attend, Normalise, Add, Clip, Experts, Narrow, Head, Torch, Gate };

struct Step {
    StepKind kind;
    int src = 0, to = 0;
    NormRef norm;
    bool add = false;
    std::vector<OutputRef> outputs;  // Linear; Head has one; Embed has the table; Gated gate and up; Experts router, gate, up, down
    float scale = 1;                 // Embed, Attend
    Activation activation = Activation::Silu;
    int groups = 1;    // Normalise
    float bound = 0;   // Clip; softcap of Attend and Head
    int k = 0, v = 0;  // Attend: buffers, or -1; Gate: k is up
    int store = 0, heads = 0, kv_heads = 0, dim = 0, window = 0, rotary = -1;
    NormRef q_norm, k_norm;
    int experts = 0, chosen = 0;  // Experts
    int64_t stride = 0;           // Experts that live elsewhere: bytes from a slot to the next; 0: all of them one after another
    bool renormalize = true;
    std::vector<int> buffers;  // Narrow
};

struct StoreSpec {
    Codec codec;
    int heads, dim, keep, sinks;
    std::shared_ptr<VqBooks> books;  // VQ
};

struct RotarySpec {
    const float* frequencies;
    int half;
    float gain;
};

struct Plan {
    int vocab = 0;
    std::vector<int> widths;
    std::vector<StoreSpec> stores;
    std::vector<RotarySpec> rotaries;
    std::vector<Step> steps;
    int widest = 0;  // columns of the widest input of a matrix, padded
};

// Reads a plan from the words that orchard/ops/kernels/native/program.py writes. The Python side has checked it.
Plan read_plan(const int64_t* words);

// The stores of some sequences that come and go. Each has a length of its own that it may grow to, and memory for the tokens it
// has, which at least doubles when it runs out.
class Kept;  // kept.h

class Cache {
  public:
    // What a head of a store is read and written by: the slot of position p is p - base (rings: `slot` of it).
    struct Look {
        Store store;
        int head, base;
    };
    // With a `length`, all sequences are there at once, with memory for so many tokens each; with 0, none is there yet.
    Cache(const Plan& plan, int sequences, int length, int chunk);
    // A sequence of up to `length` tokens, empty. Memory comes with its tokens.
    void open(int sequence, int length);
    // Room for so many tokens; what is there stays.
    void reserve(int sequence, int tokens) {
        if (tokens > sequences_[sequence].capacity) grow(sequence, tokens);
    }
    // The first tokens of another sequence, into one that has fewer. False where the other one's rings no longer hold all of them.
    bool copy(int source, int target, int tokens);
    Store view(int store, int sequence) const;
    Look look(int store, int sequence, int head) const;
    // The slot of a position, and the table of positions per slot (null: slot = position).
    int slot(int store, int sequence, int position) const;
    int32_t* positions(int store, int sequence) const;
    int length() const { return longest_; }  // of the longest sequence
    int length(int sequence) const { return sequences_[sequence].length; }
    int capacity(int sequence) const { return sequences_[sequence].capacity; }
    int sequences() const { return (int)sequences_.size(); }
    // Gives a sequence's memory back. Some is kept for the next ones, which then need not wait for fresh pages; the system may take
    // its pages meanwhile. Attention never looks at slots that hold nothing yet, so what lies there does not matter.
    void release(int sequence);
    bool alive(int sequence) const { return sequences_[sequence].length > 0; }
    // Memory of a sequence that has so many tokens, as long as it may grow further; and of all sequences now.
    size_t memory(int tokens) const;
    size_t memory() const;

    // What a sequence's stores hold of its first `tokens` tokens, as one run of bytes: all slots, or of a ring those that a token
    // after them may still see. `put` takes what `take` gave for `held` tokens of the same plan and uses the first `tokens` of
    // them; with rings these must be equal.
    size_t bytes(int tokens) const;
    void take(int sequence, int tokens, uint8_t* to) const;
    void put(int sequence, int tokens, int held, const uint8_t* from);

    // A sequence under a budget in the place of what was there; null where it has none. `bound` goes after everything that changes
    // one: it then knows how far positions may go.
    void budget(int sequence, std::shared_ptr<Kept> kept);
    Kept* kept(int sequence) const { return sequences_[sequence].kept.get(); }
    void bound(int sequence);

  private:
    struct Place {
        int capacity, width;
        size_t k, v, k_scale, v_scale, positions, exact;  // offsets in a sequence's memory
    };
    struct Sequence {
        int length = 0, capacity = 0;  // tokens: the most there may be, and what there is memory for
        std::vector<Place> places;
        Block memory;
        std::shared_ptr<Kept> kept;
    };
    size_t arrange(int tokens, std::vector<Place>& places) const;
    void grow(int sequence, int tokens);
    void take_memory(int sequence, int tokens);
    void copy_slots(const Sequence& from, Sequence& to, int tokens) const;
    void copy_store(int number, const Sequence& from, Sequence& to, int tokens) const;
    Block some_memory(size_t bytes);
    void spare(Block memory);
    int slot_of(int store, const Place& place, int position) const;
    template <class Visit>
    void pieces(const Sequence& sequence, int tokens, int held, const Visit& visit) const;

    const Plan& plan_;
    int chunk_, longest_ = 0;
    std::vector<Sequence> sequences_;
    std::vector<Block> spare_;
    size_t spare_bytes_ = 0;
};

constexpr int PART = 512;  // slots of one part of attention: fixed, so that results do not depend on who computes what
inline int part_slots(const StoreSpec& spec) { return spec.codec == Codec::VQ ? VQ_PART : PART; }

struct Rows {  // the tokens of a call; after Narrow, those whose scores are wanted
    int count = 0;
    const int32_t* sequences = nullptr;
    const int32_t* positions = nullptr;
};

// Whose queries are followed in a call, to learn which slots of a sequence under a budget matter: every slot's largest share of a softmax,
// over all rows of the sequence and all query heads that read it; or the sum over the rows, of the mean over the query heads of each
// layer that reads it. [stores][heads][slots that there are], to which is added what is seen.
struct Watch {
    int sequence = -1;
    float* best = nullptr;
    bool sum = false;
};

struct RowRun {  // rows of one sequence at consecutive positions
    int first, count;
};

// How many threads to decode with. When another program wants a core, threads that must meet every few microseconds wait for
// whichever of them is not running, and two are slower than one. So the time of calls is followed for all threads and for one
// alone. A call in which threads fell asleep is a reason to try with one, and after a while all of them are tried again.
class Crowd {
  public:
    int threads(int all) { return left_ > 0 ? 1 : all; }
    void saw(int threads, int sleeps, double seconds);

  private:
    static constexpr int MANY_SLEEPS = 3, TRIAL = 6, SHORTEST = 16, LONGEST = 256;  // calls
    static void follow(double& mean, double seconds) { mean = mean > 0 ? mean + (seconds - mean) / 8 : seconds; }
    double together_ = 0, alone_ = 0, best_ = 0;  // seconds of a call, 0 where not known
    int left_ = 0, pause_ = SHORTEST, calm_ = 0;
};

class Engine {
  public:
    Engine(Plan plan, int threads, int level);

    enum Problem { OK = 0, BAD_TOKEN = -1, BAD_SEQUENCE = -2, BAD_POSITION = -3, NO_MEMORY = -4 };

    // Steps [first, last) for `count` tokens: rows of a sequence stand together, in the order of their positions. Scores of the wanted
    // rows (ascending) go to scores [wanted_count][vocab]. `prompt`: all rows go the way that many rows go, however few they are,
    // so that a token's keys and values do not depend on the cut of its prompt into calls.
    Problem run(Cache& cache, int first, int last, bool prompt, int count, const int32_t* tokens, const int32_t* sequences,
                const int32_t* positions, int wanted_count, const int32_t* wanted, float* scores, Watch watch = Watch());

    // One part of a step whose experts live elsewhere, for the rows of the last call: choose, compute what has a slot, add up.
    enum class Part : int { Route = 0, Compute = 1, Combine = 2 };
    void part(int step, Part part, const int32_t* slots);
    // What `Route` has chosen: [rows][chosen] experts, as many weights, [rows][experts] probabilities.
    int32_t* choices() const { return expert_.as<int32_t>(); }

    const Plan& plan() const { return plan_; }
    float* buffer(int number) const { return buffers_[number].as<float>(); }
    int rows() const { return rows_.count; }
    int threads() const { return pool_.size(); }

    struct Seconds {  // per kind of step, of thread 0, when timing is on
        double total[16] = {};
        int calls = 0, alone = 0;  // of few rows; with one thread because another program wanted a core
    };
    Seconds seconds;
    bool timed = false;

  private:
    friend struct Walk;
    struct Scratch {  // one per thread
        Block x, quant, out, gate, gained, panel, attention, query, watch;
    };
    void reserve(int rows);
    void reserve_kept(const Cache& cache, int rows, const int32_t* sequences, const Watch& watch);
    void find_runs();
    size_t thread_parts(const Step& step, const Cache& cache) const;
    static void work(void* engine, int thread, int threads);
    static void part_work(void* engine, int thread, int threads);
    void in_pass(Pool::Work work);

    Plan plan_;
    Pool pool_;
    const LinearKernels* linear_;
    const MatrixKernels* matrix_;
    const AttentionKernels* attention_;
    const VectorKernels* vector_;
    const WatchKernels* watching_;
    std::vector<Block> buffers_;
    std::vector<Block> cosines_, sines_;  // per rotary [rows][half]
    std::vector<Scratch> scratch_;
    Block shared_, parts_, expert_;  // activations of many rows; attention parts; what experts need
    int reserved_ = 0;
    std::mutex mutex_;
    Crowd crowd_;
    struct Pass {  // a call of few rows, which may come in several pieces
        int threads = 1, sleeps = 0;
        double seconds = 0;
    };
    Pass pass_;

    // State of the call that runs.
    Rows rows_;
    const int32_t* tokens_ = nullptr;
    int wanted_count_ = 0;
    const int32_t* wanted_ = nullptr;
    float* scores_ = nullptr;
    Cache* cache_ = nullptr;
    int first_ = 0, last_ = 0;
    bool prompt_ = false;
    Watch watch_;
    std::mutex watch_mutex_;
    Part part_ = Part::Route;
    const int32_t* slots_ = nullptr;
    bool narrowed_ = false;
    std::vector<int32_t> narrow_sequences_, narrow_positions_;
    std::vector<RowRun> runs_;
    bool long_runs_ = false;  // whether some run has several rows, so that keys must be kept before anybody attends
    std::atomic<int> next_task_{0};
    std::vector<std::atomic<int>> done_;  // finished parts per row and key head; all zero between steps
};

}  // namespace orchard
