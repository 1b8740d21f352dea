"""Bubble sort: fifty hands of five cards are mixed and put in order again. Which cards are
exchanged depends on what the variables hold.
"""

a, b, c, d, e = 1, 2, 3, 4, 5
number = 7
for hand in range(50):
    for times in range(8):
        number = (75 * number + 74) % 65537
        if number % 3 == 0:
            a, b, c, d, e = c, e, a, b, d
        elif number % 3 == 1:
            a, b, c, d, e = b, d, e, a, c
        else:
            a, b, c, d, e = e, a, d, c, b
    print('c', c)
    for sweep in range(4):
        if a > b:
            a, b = b, a
        if b > c:
            b, c = c, b
        if c > d:
            c, d = d, c
        if d > e:
            d, e = e, d
        if sweep == 0:
            print('b', b)
    print('d', d)
