"""Vocabulary of answers: commands of LaTeX by what they mean, and words that change an answer.

Used by `tokens` and `structure`; data only.
"""


def word_set(text: str) -> frozenset[str]:
    """Words of a text."""
    return frozenset(text.split())


LAYOUT = word_set(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle textstyle"
    " scriptstyle limits nolimits quad qquad enspace thinspace hfill noindent allowbreak rm bf it boxed fbox"
    " underline ensuremath mathstrut therefore"
) | frozenset(",;:!> ~&\n\t")
TEXTS = word_set("text textbf textit textrm textnormal textsf texttt mbox hbox emph")
FONTS = word_set("mathrm mathbf mathit mathsf mathcal mathtt boldsymbol bm operatorname pmb")
DROPPED = word_set("hspace vspace phantom hphantom vphantom color textcolor label tag")  # with their argument
ACCENTS = word_set("vec hat bar overline widehat tilde overrightarrow dot ddot")
FUNCTIONS = word_set(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan ln log lg exp max min gcd lcm"
)
GREEK = word_set(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi"
    " psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell vartheta"
)
SYNONYMS = {
    "row": "cr",
    "frac": "dfrac tfrac cfrac",
    "binom": "dbinom tbinom",
    "le": "leq leqslant leqq",
    "ge": "geq geqslant geqq",
    "ne": "neq",
    "*": "times cdot ast cdotp",
    "/": "div",
    "{": "lbrace",
    "}": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    "|": "lvert rvert vert mid",
    "<": "lt",
    ">": "gt",
    "'": "prime",
    ":": "colon",
    "emptyset": "varnothing",
    "infty": "infin infinity inf",
    "circ": "degree",
    "dots": "ldots cdots dotsc",
    "approx": "approxeq simeq",
    "setminus": "backslash smallsetminus",
    "phi": "varphi",
    "epsilon": "varepsilon",
    "and": "land wedge",
    "or": "lor vee",
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
}
MEANS = {variant: name for name, variants in SYNONYMS.items() for variant in variants.split()}
PLAIN = {"**": "^", "<=": "le", ">=": "ge", "!=": "ne", "==": "=", "∕": "/", "⁄": "/"}
SPELLED = {"pi": "pi", "infty": "infty", "infinity": "infty", "inf": "infty", "sqrt": "sqrt", "theta": "theta"}
UNITS_AND_TEENS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen nineteen twenty"
)
NUMBERS = dict(zip(UNITS_AND_TEENS.split(), range(21), strict=True))
MULTIPLES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NO_UNITS = word_set(
    "not no none never neither nor negative minus plus squared cubed half halves third thirds quarter quarters"
    " dozen score mod modulo base more less fewer most least greater than approximately about around between to"
    " from factorial if when for where while unless except infinite infinity undefined does do exist is are was"
    " be it the at out but only maybe either other with without up down root cannot can impossible each all any"
    " fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth hundredths thousandth"
    " thousandths below above under over past"
)  # words that say something else than a unit
SHORT_WORDS = word_set("yes no odd all any not the is are at of as to if by per day row")
NEGATIONS = word_set("not no never nor neither cannot isn doesn")
ALL_NUMBERS = {"all real numbers", "all reals", "all real number", "real numbers", "all real values"}
NO_ANSWER = {"no solution", "no solutions", "no real solutions", "no real solution", "none", "empty set"}
