"""Functions of three integers. Their straight lines are lines of the integer programs of `assign`.
"""


def fibonacci(a, b, c):
    while abs(a + b) <= 9 and abs(c) < 9:
        c = a + b
        a = b
        b = c
    return c


def running_sum(a, b, c):
    for b in (4, 3, 2, 1):
        c = c + b
        a = c - a
    return a


def alternating_sum(a, b, c):
    for b in (1, 2, 3, 4, 5):
        a = b - a
        c = a
    return c


def countdown(a, b, c):
    c = 0
    while a > 0:
        a = a - 1
        c = c + 1
    return c


def difference_of_sums(a, b, c):
    for c in (1, 2, 3):
        a = a + c
        b = b - c
    c = b - a
    return c


def sort_two(a, b, c):
    if b > a:
        c = a
        a = b
        b = c
    c = a - b
    return c
