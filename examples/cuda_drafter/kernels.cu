// The work of a drafter on a GPU: it keeps the tokens of all slots, looks up what followed the last ones, and chooses
// with the noise of docs/noise.md. Compiled by NVRTC when the drafter starts.

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;

constexpr int THREADS = 256;         // of a block
constexpr int MOST_INTEGERS = 512;   // that one launch brings
constexpr int LONGEST_MATCH = 4;     // tokens
constexpr float LOGIT = 2.0f;        // of each token of a match

// What the drafter knows of its slots, in memory of its own.
struct Slots {
    int* tokens;           // [num_slots, capacity], by position
    int64* begins;         // [num_slots]: position of the first token that is known
    int64* ends;           // [num_slots]: position behind the last one
    float* temperatures;   // [num_slots]
    uint64* seeds;         // [num_slots]
    int64 capacity;
    int64 vocab_size;
};

// The stash, as verify writes it: anything may be in it.
struct Stash {
    const int64* seq_lens;
    const int64* num_new;
    const int64* last_tokens;   // [num_slots, num_draft_tokens + 1]
};

// Integers that travel with a launch, which copies them: a command may be gone before the stream gets there.
struct Integers {
    int count;
    int values[MOST_INTEGERS];
};

__device__ int64 clamped(int64 value, int64 low, int64 high) {
    return value < low ? low : value > high ? high : value;
}

// The sequence has `count` tokens from `start` on now. Forgets the tokens before a gap.
__device__ void extend(const Slots& slots, int slot, int64 start, int64 count) {
    if (start < slots.begins[slot] || start > slots.ends[slot]) slots.begins[slot] = start;
    slots.ends[slot] = start + count;
}

__device__ uint32 random_word(uint64 seed, uint32 position, uint32 token) {
    uint32 c0 = token >> 2, c1 = position, c2 = 0, c3 = 0;
    uint32 k0 = (uint32)seed, k1 = (uint32)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64 product_0 = (uint64)c0 * 0xD2511F53u, product_1 = (uint64)c2 * 0xCD9E8D57u;
        c0 = (uint32)(product_1 >> 32) ^ c1 ^ k0;
        c2 = (uint32)(product_0 >> 32) ^ c3 ^ k1;
        c1 = (uint32)product_1;
        c3 = (uint32)product_0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (token & 2) ? (token & 1 ? c3 : c2) : (token & 1 ? c1 : c0);
}

__device__ float gumbel_noise(uint64 seed, uint32 position, uint32 token) {
    double word = random_word(seed, position, token);
    return (float)-log(-log1p(-(word + 0.5) * 0x1p-32));
}

// How likely the token at `place` is to follow at `end`: by the tokens before both that are equal.
__device__ float score(const Slots& slots, int slot, int64 begin, int64 place, int64 end) {
    const int* tokens = slots.tokens + slot * slots.capacity;
    int match = 0;
    while (match < LONGEST_MATCH && place - 1 - match >= begin && tokens[place - 1 - match] == tokens[end - 1 - match])
        match++;
    float temperature = slots.temperatures[slot];
    if (temperature == 0.0f) return match;
    return LOGIT * match / temperature + gumbel_noise(slots.seeds[slot], (uint32)end, tokens[place]);
}

// Writes the time, in nanoseconds, on the clock that all processes of a GPU share.
extern "C" __global__ void stamp(uint64* target) {
    uint64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) *target = now;
}

// A request takes a slot.
extern "C" __global__ void take_over(Slots slots, int slot, float temperature, uint64 seed) {
    if (threadIdx.x != 0) return;
    slots.temperatures[slot] = temperature;
    slots.seeds[slot] = seed;
}

// Takes in a piece of a chunk: one block.
extern "C" __global__ void put(Slots slots, int slot, int64 start, const __grid_constant__ Integers piece) {
    int64 count = clamped(slots.capacity - start, 0, piece.count);
    for (int64 place = threadIdx.x; place < count; place += THREADS)
        slots.tokens[slot * slots.capacity + start + place] = piece.values[place];
    if (threadIdx.x == 0 && count > 0) extend(slots, slot, start, count);
}

// Takes in the stash of each slot, and guesses `num_guesses` tokens, of at most `width`: one block for each of `rows`.
extern "C" __global__ void propose(
    Slots slots,
    Stash stash,
    int64* draft_tokens,
    int64* num_proposed,
    int64 width,
    int64 num_guesses,
    const __grid_constant__ Integers rows
) {
    __shared__ float scores[THREADS];
    __shared__ int64 places[THREADS];
    if (blockIdx.x >= rows.count) return;
    int slot = rows.values[blockIdx.x];
    int* tokens = slots.tokens + slot * slots.capacity;
    if (threadIdx.x == 0) {
        // Clamped, because the memory may hold anything: a length becomes an index, a token an id.
        int64 num_new = clamped(stash.num_new[slot], 1, width + 1);
        int64 last = clamped(stash.seq_lens[slot], num_new - 1, slots.capacity - width - 1);
        int64 start = last + 1 - num_new;
        for (int64 number = 0; number < num_new; number++)
            tokens[start + number] = (int)clamped(stash.last_tokens[slot * (width + 1) + number], 0, slots.vocab_size - 1);
        extend(slots, slot, start, num_new);
        num_proposed[slot] = num_guesses;
    }
    __syncthreads();
    int64 begin = slots.begins[slot], end = slots.ends[slot];
    for (int64 number = 0; number < num_guesses; number++, end++) {
        float best = -1e30f;  // less than any score
        int64 best_place = end - 1;
        for (int64 place = begin + threadIdx.x; place < end; place += THREADS) {
            float found = score(slots, slot, begin, place, end);
            if (found >= best) best = found, best_place = place;
        }
        scores[threadIdx.x] = best;
        places[threadIdx.x] = best_place;
        __syncthreads();
        for (int half = THREADS / 2; half > 0; half /= 2) {
            int other = threadIdx.x + half;
            if (threadIdx.x < half
                && (scores[other] > scores[threadIdx.x]
                    || (scores[other] == scores[threadIdx.x] && places[other] > places[threadIdx.x]))) {
                scores[threadIdx.x] = scores[other];
                places[threadIdx.x] = places[other];
            }
            __syncthreads();
        }
        // Behind the end, where the next step writes what the target chose.
        if (threadIdx.x == 0) draft_tokens[slot * width + number] = tokens[end] = tokens[places[0]];
        __syncthreads();
    }
}
