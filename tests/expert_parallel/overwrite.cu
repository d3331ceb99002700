// overwrite.cu   A kernel of the user's behind a call: it gives a number that the call read another value.
#include "ptx.cuh"

extern "C" __global__ void overwrite(int32_t* gmem, int32_t value) {
    *gmem = value;
}
