"""Operations whose results are rounded in a way of their own."""
