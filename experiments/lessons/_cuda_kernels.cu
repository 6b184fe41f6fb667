// Four kernels in CUDA C++, to be read beside their forms in Triton: add, softmax, matmul, causal attention.
//
// The experiment gpu_lessons compiles this file by NVRTC, which needs no headers for it: bf16 is its bits, and what C++
// has no word for (asynchronous copies, tensor cores) is one PTX instruction in a small function. For compute
// capability 8.0 and up. A kernel is right for the sizes that its comment names, launched with the grid and block that
// stand there.

typedef unsigned short bf16;

// ==== add ====
// z = x + y, in fp32.
// Shapes: count elements, a multiple of 1,024. Bytes: x, y and z once.
// Grid (count / 1,024), block 256: a thread adds four neighbours, so that a warp asks for 512 bytes in a row at once.

extern "C" __global__ void add(const float4* x, const float4* y, float4* z) {
    int i = blockIdx.x * 256 + threadIdx.x;
    float4 a = x[i], b = y[i];
    z[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// ==== softmax ====
// y = exp(x - max x) / sum exp(x - max x), for each row, in fp32.
// Shapes: x and y (rows, 4,096). Bytes: x and y once, because a row stays in registers: 16 elements in each thread.
// Grid (rows), block 256. A maximum or a sum goes through the lanes of a warp by shuffles, and from warp to warp
// through shared memory.

constexpr int SOFTMAX_COLS = 4096, SOFTMAX_THREADS = 256, SOFTMAX_WARPS = SOFTMAX_THREADS / 32;
constexpr int VECTORS = SOFTMAX_COLS / 4 / SOFTMAX_THREADS;  // of four elements, in each thread

// Combine the values of all threads; each gets the result. `partial` has room for a value of each warp.
template <class Operation>
__device__ float over_block(float value, float* partial, Operation combine) {
    for (int distance = 16; distance > 0; distance /= 2)
        value = combine(value, __shfl_xor_sync(0xffffffff, value, distance));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = partial[0];
    for (int warp = 1; warp < SOFTMAX_WARPS; ++warp) value = combine(value, partial[warp]);
    return value;
}

extern "C" __global__ void softmax(const float4* x, float4* y) {
    __shared__ float maxima[SOFTMAX_WARPS], sums[SOFTMAX_WARPS];
    long long first = blockIdx.x * (long long)(SOFTMAX_COLS / 4) + threadIdx.x;
    float4 v[VECTORS];
    float largest = __int_as_float(0xff800000);  // -infinity
    for (int i = 0; i < VECTORS; ++i) {
        v[i] = x[first + i * SOFTMAX_THREADS];
        largest = fmaxf(largest, fmaxf(fmaxf(v[i].x, v[i].y), fmaxf(v[i].z, v[i].w)));
    }
    largest = over_block(largest, maxima, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0;
    for (int i = 0; i < VECTORS; ++i) {
        v[i] = make_float4(expf(v[i].x - largest), expf(v[i].y - largest), expf(v[i].z - largest),
                           expf(v[i].w - largest));
        sum += (v[i].x + v[i].y) + (v[i].z + v[i].w);
    }
    float factor = 1 / over_block(sum, sums, [](float a, float b) { return a + b; });
    for (int i = 0; i < VECTORS; ++i)
        y[first + i * SOFTMAX_THREADS] =
            make_float4(v[i].x * factor, v[i].y * factor, v[i].z * factor, v[i].w * factor);
}

// ==== tensor cores ====
// What matmul and attention share. A warp multiplies (16, 16) by (16, 8): each lane holds some elements of each matrix,
// two bf16 in a register. With g = lane / 4 and t = lane % 4 it has
//     of A (16, 16)  rows g and g + 8, columns 2t, 2t + 1, 2t + 8 and 2t + 9: a[0] and a[1] are the left half
//     of B (16, 8)   rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1), column g
//     of C (16, 8)   rows g (c[0], c[1]) and g + 8 (c[2], c[3]), columns 2t and 2t + 1, in fp32

// c += a b.
__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8: lane i has the address of row i % 8 of matrix i / 8, and gets in r[m] the elements 2t and
// 2t + 1 of row g of matrix m; transposed those of column g.
__device__ void load_matrices(unsigned (&r)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}

__device__ void load_transposed(unsigned (&r)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}

// Two fp32 as bf16 in one register, rounded to nearest.
__device__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Start to copy 16 bytes to shared memory; `wait_for_copies` waits for all that this thread started.
__device__ void copy_16_bytes(bf16* to, const bf16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// A tile in shared memory. Eight more columns move each row to other banks than the seven before it, so that the eight
// rows of a matrix are read at once.
template <int ROWS, int COLS>
struct alignas(16) Tile {
    bf16 at[ROWS][COLS + 8];

    // Start to copy a tile of a matrix whose rows are `stride` elements apart.
    __device__ void copy(const bf16* from, int stride, int threads) {
        for (int i = threadIdx.x; i < ROWS * COLS / 8; i += threads) {
            int row = i / (COLS / 8), col = i % (COLS / 8) * 8;
            copy_16_bytes(&at[row][col], from + (long long)row * stride + col);
        }
    }

    // The address that this lane gives for the (16, 16) elements from (row, col): left half first, rows 0 to 7 first.
    __device__ const bf16* place(int row, int col) const {
        int lane = threadIdx.x % 32;
        return &at[row + lane % 16][col + lane / 16 * 8];
    }
};

// ==== matmul ====
// C = A B, bf16 with sums in fp32.
// Shapes: A (rows, depth), B (depth, cols), C (rows, cols); rows and cols multiples of 128, depth of 32.
// Grid (cols / 128, rows / 128), block 256: a block computes 128 x 128 of C, each of its 2 x 4 warps 64 x 32, from
// 128 x 32 of A and 32 x 128 of B at a time. While these are multiplied the next ones are copied to the other buffer.

extern "C" __global__ void __launch_bounds__(256, 2) matmul(const bf16* a, const bf16* b, bf16* c, int cols,
                                                            int depth) {
    __shared__ Tile<128, 32> a_tiles[2];
    __shared__ Tile<32, 128> b_tiles[2];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row = warp / 4 * 64, col = warp % 4 * 32;  // of the warp's part
    a += (long long)blockIdx.y * 128 * depth;
    b += blockIdx.x * 128;
    c += (long long)blockIdx.y * 128 * cols + blockIdx.x * 128;
    float sums[4][4][4] = {};  // of 16 rows, of 8 columns, of the lane
    a_tiles[0].copy(a, depth, 256);
    b_tiles[0].copy(b, cols, 256);
    for (int k = 0, now = 0; k < depth; k += 32, now ^= 1) {
        wait_for_copies();
        __syncthreads();  // everyone's copies are there, and nobody reads the other buffer any more
        if (k + 32 < depth) {
            a_tiles[now ^ 1].copy(a + k + 32, depth, 256);
            b_tiles[now ^ 1].copy(b + (k + 32) * (long long)cols, cols, 256);
        }
        for (int part = 0; part < 32; part += 16) {
            unsigned a_part[4][4], b_part[2][4];
            for (int i = 0; i < 4; ++i) load_matrices(a_part[i], a_tiles[now].place(row + 16 * i, part));
            for (int j = 0; j < 2; ++j) load_transposed(b_part[j], b_tiles[now].place(part, col + 16 * j));
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j)
                    multiply(sums[i][j], a_part[i], b_part[j / 2][j % 2 * 2], b_part[j / 2][j % 2 * 2 + 1]);
        }
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            for (int half = 0; half < 2; ++half) {  // rows g and g + 8
                int to_row = row + 16 * i + 8 * half + lane / 4, to_col = col + 8 * j + lane % 4 * 2;
                float* pair = &sums[i][j][2 * half];
                *(unsigned*)&c[(long long)to_row * cols + to_col] = pack(pair[0], pair[1]);
            }
}

// ==== attention ====
// O = softmax(Q K^T / 8) V, where a query sees the keys up to its own; bf16 with sums in fp32.
// Shapes: Q, K, V and O (heads, length, 64), contiguous; length a multiple of 64.
// Grid (length / 64, heads), block 128: a block owns 64 queries of one head, each of its 4 warps 16 of them, and walks
// over tiles of 64 keys. Of each row it keeps the maximum and the sum of exponentials so far, and shrinks what it has
// summed by exp(old maximum - new maximum): no (length, length) matrix is ever written. A lane has parts of two rows,
// g and g + 8. The exponentials of a tile lie in registers, as C does, just where the next multiplication wants its A.

constexpr float SCALE_LOG2 = 0.125f * 1.44269504f;  // exp(s / 8) = exp2(s * SCALE_LOG2)

extern "C" __global__ void __launch_bounds__(128, 4) attention(const bf16* q, const bf16* k, const bf16* v,
                                                               bf16* o, int length) {
    __shared__ Tile<64, 64> k_tiles[2], v_tiles[2];
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int tile = gridDim.x - 1 - blockIdx.x;  // the longest first
    long long head = (long long)blockIdx.y * length * 64;
    long long first = head + (tile * 64 + warp * 16 + g) * 64 + 2 * t;  // of this lane's elements of q and o
    k += head;
    v += head;
    unsigned q_part[4][4];  // of 16 columns, as A
    for (int part = 0; part < 4; ++part)
        for (int r = 0; r < 4; ++r)
            q_part[part][r] = *(const unsigned*)&q[first + r % 2 * 8 * 64 + part * 16 + r / 2 * 8];
    float sums[8][4] = {};  // of O, of 8 columns
    float row_max[2] = {__int_as_float(0xff800000), __int_as_float(0xff800000)}, row_sum[2] = {};
    k_tiles[0].copy(k, 64, 128);
    v_tiles[0].copy(v, 64, 128);
    for (int step = 0, now = 0; step <= tile; ++step, now ^= 1) {
        wait_for_copies();
        __syncthreads();
        if (step < tile) {
            k_tiles[now ^ 1].copy(k + (step + 1) * 64 * 64, 64, 128);
            v_tiles[now ^ 1].copy(v + (step + 1) * 64 * 64, 64, 128);
        }
        float s[8][4] = {};  // scores, of 8 keys
        for (int part = 0; part < 4; ++part)
            for (int j = 0; j < 4; ++j) {  // 16 keys; they lie by rows, as B wants its columns
                unsigned b[4];
                load_matrices(b, k_tiles[now].place(16 * j, 16 * part));
                multiply(s[2 * j], q_part[part], b[0], b[2]);
                multiply(s[2 * j + 1], q_part[part], b[1], b[3]);
            }
        if (step == tile)  // the diagonal
            for (int j = 0; j < 8; ++j)
                for (int e = 0; e < 4; ++e)
                    if (8 * j + 2 * t + e % 2 > 16 * warp + g + e / 2 * 8) s[j][e] = __int_as_float(0xff800000);
        for (int half = 0; half < 2; ++half) {
            float largest = row_max[half];
            for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
            for (int distance = 1; distance < 4; distance *= 2)  // the four lanes of a row
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
            float shrink = exp2f((row_max[half] - largest) * SCALE_LOG2), shift = largest * SCALE_LOG2;
            row_max[half] = largest;
            row_sum[half] *= shrink;
            for (int j = 0; j < 8; ++j)
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    s[j][e] = exp2f(s[j][e] * SCALE_LOG2 - shift);
                    row_sum[half] += s[j][e];
                    sums[j][e] *= shrink;
                }
        }
        for (int part = 0; part < 4; ++part) {  // of 16 keys
            float *left = s[2 * part], *right = s[2 * part + 1];
            unsigned p[4] = {pack(left[0], left[1]), pack(left[2], left[3]),
                             pack(right[0], right[1]), pack(right[2], right[3])};
            for (int j = 0; j < 4; ++j) {  // 16 columns
                unsigned b[4];
                load_transposed(b, v_tiles[now].place(16 * part, 16 * j));
                multiply(sums[2 * j], p, b[0], b[1]);
                multiply(sums[2 * j + 1], p, b[2], b[3]);
            }
        }
    }
    for (int half = 0; half < 2; ++half) {
        for (int distance = 1; distance < 4; distance *= 2)
            row_sum[half] += __shfl_xor_sync(0xffffffff, row_sum[half], distance);
        for (int j = 0; j < 8; ++j)
            *(unsigned*)&o[first + half * 8 * 64 + 8 * j] =
                pack(sums[j][2 * half] / row_sum[half], sums[j][2 * half + 1] / row_sum[half]);
    }
}
