"""What files say of themselves in their headers, and the manager that they need."""
