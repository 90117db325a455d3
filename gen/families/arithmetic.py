"""Numbers that the families of tensor cores compute with in the same way: polynomials, and units of f16."""

#: c[0] + c[1] f + c[2] f^2 + c[3] f^3 is 2^f to 1e-4 for |f| <= 1/2: minimax in relative error.
EXP2_CUBIC = (0.99992807, 0.69326099, 0.24261117, 0.05517169)
#: The power of two by which a row's running maximum may lag behind, where outputs follow it lazily.
LAG = 8.0
#: Powers of two in the units that bring float32 into the range of f16: what the largest element of a row or
#: tensor is brought to, the least unit, and what a row's largest weight is; where maxima lag, 2^PARTS_LAG
#: times that, which must not exceed f16 but be seldom exceeded itself.
TOP_EXPONENT, LEAST_EXPONENT, WEIGHT_EXPONENT, PARTS_LAG = 12, -113, 13, 2.875
#: The same of weights of e4m3, whose largest number is 448: a row's largest is exactly 2^8, so that it loses
#: nothing where it is nearly all of the row, and no maximum may lag behind.
EIGHT_BITS_EXPONENT, EIGHT_BITS_LAG = 8, 0.0
#: Straight lines between powers of two, as e4m3's numbers are when they are counted: how many numbers lie
#: between two powers, by how many of them the lines lie above 2^x on average over x, and how far a maximum
#: may lag behind, as sums are of the same weights: 2^8.75 is the largest number but for rounding.
STRAIGHT_STEPS, STRAIGHT_BIAS, STRAIGHT_LAG = 8, 0.457, 0.75
#: By which power of two, at most, weights are measured against more than the maximum of a row's first tiles.
STRAIGHT_ROOM = 3.5
#: Up to which power of two maxima are trusted of scores that are f16: they are off by 2^-12 of themselves, an
#: eighth of a power there, which weights by straight lines just bear.
PAIRS_TRUSTED = 9
