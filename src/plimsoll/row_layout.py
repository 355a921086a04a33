"""Layout of a bank's rows, for every backend alike.

A bank is an int64 tensor of shape ``[rows, width]``; a row is one spectrum. Four fields are float64 sums, stored as
their bits (view the bank as float64 to read them). All the others are integers.

**A row of zeros is the empty spectrum**, so a bank is emptied by filling it with zero, and merging two rows adds every
field but the three extremes, which take the larger. Extremes are keys that make this true, each the bits of a float64:

- ``POSITIVE``: the largest positive value; 0 if there is none.
- ``NEGATIVE``: the magnitude of the most negative value; 0 if there is none.
- ``NEAREST``: ``ABSMIN_TOP - bits`` of the smallest nonzero magnitude; 0 if there is none. (For positive floats the
  order of the bits is the order of the values, so the larger key is the smaller magnitude.)

The signed minimum and maximum follow from these and from the count of zeros (`plimsoll.spectrum`).

All but the counts speak of finite values only. Binade index i counts the finite nonzero values with
``floor(log2(abs(x))) == i - 149``; float64 values below or above go to the first and last index.

A wide row (`WIDE`) has the block record behind: how far each nonzero finite value lies below its block's largest one,
in binades, for the finite blocks; and how many blocks have their largest value in which binade.
"""

LOWEST_BINADE = -149
BINADES = 277

COUNT, ZEROS, NANS, POS_INFS, NEG_INFS = range(5)
POSITIVE, NEGATIVE, NEAREST = 5, 6, 7
SUM, ABSSUM, SUMSQ, SUMFOURTH = 8, 9, 10, 11  # float64 bits
HISTOGRAM = 12  # 277 binades: index 12 to 288
NARROW = HISTOGRAM + BINADES  # 289 words, 2,312 bytes
EXTREMES, SUMS = slice(POSITIVE, SUM), slice(SUM, HISTOGRAM)

BLOCKS = NARROW  # blocks in all, a ragged last one included
ZERO_BLOCKS = NARROW + 1  # blocks of zeros only
NONFINITE_BLOCKS = NARROW + 2  # blocks that hold a NaN or an Inf
POISONED = NARROW + 3  # nonzero finite values in those: left out of DEPTHS
DEPTHS = NARROW + 4  # 277: values by exponent(largest magnitude of the block) - exponent(value)
MAXIMA = DEPTHS + BINADES  # 277: finite nonzero blocks by the binade of their largest magnitude
WIDE = MAXIMA + BINADES + 1  # 848 words, padded to a multiple of 8

ABSMIN_TOP = 0x7FF0_0000_0000_0000  # the bits of float64 Inf

# A row of moves, beside the row of the bank that holds the spectrum of the same update. A push is what asks a value to
# move: its gradient.
PUSHED, UNMOVED = 0, 1  # values whose push is not zero; those among them that are the same after as before
OLD_SUMSQ = 2  # sum of squares of the old values, float64 bits
MOVES = 3  # words

# A row of errors: float64[11], how values differ from a reference. Sums are over the pairs that are finite on both
# sides; e is value - reference, x the reference. A row of zeros is the empty one, and merging two adds every field but
# the largest error, of which it takes the larger.
COMPARED, ERROR, ERRORSQ = range(3)  # pairs; sums of e and e^2
REFERENCE, REFERENCESQ, ERROR_REFERENCE = range(3, 6)  # sums of x, x^2 and e x
LARGEST_ERROR = 6  # the largest |e|
MADE_NONFINITE, REFERENCE_NONFINITE = 7, 8  # values that are NaN or Inf where the reference is finite; such references
UNDERFLOWED, STRUCTURAL = 9, 10  # zeros whose reference is nonzero (a NaN is not), and whose reference is zero
ERRORS = 11  # float64 words


def width(block: int) -> int:
    """Words in a row: wide where a block length is given (0 means none)."""
    return WIDE if block else NARROW
